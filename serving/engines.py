"""An engine: a process on the loopback address that generates replies. Each kind has its own
command and HTTP API.
"""

import asyncio
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx

from config.errors import EnvironmentFault
from config.ports import free_port
from serving.limits import Sampling
from serving.lines import alines
from serving.prompts import Prompt, Prompts
from serving.settings import EngineName, Settings

STOP_SECONDS = 5.0
POLL_SECONDS = 0.05
VLLM_VARIABLE = "RLHF_VLLM"
"""Path of the command vllm in another environment."""


class EngineGone(Exception):
    """The engine's process ended, or does not answer."""


class Part(NamedTuple):
    """Tokens generated since the previous part; all tokens of a reply that is not streamed."""

    text: str
    tokens: int
    """Tokens generated so far."""
    finish_reason: str | None
    """stop (at EOS) or length; None while more follows."""
    prefill_seconds: float | None = None
    """Seconds of the whole reply, with its last part, if the engine measures them."""
    decode_seconds: float | None = None


class Engine:
    """The process of one export. Subclasses define how it is started and asked."""

    title: ClassVar[str]
    start_seconds: ClassVar[float] = 60.0

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Start the process; `wait` until it answers.

        Raises EnvironmentFault if the engine is not installed or the export lacks what it loads,
        ModelError if the export is damaged.
        """
        self.folder, self.name, self.settings = folder, folder.name, settings
        self.prompts = Prompts(folder)
        self._users = 0
        port, key = free_port(), secrets.token_urlsafe(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.bound", *self.command(port, settings)],
            env={**os.environ, "RLHF_ENGINE_KEY": key, "VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def command(self, port: int, settings: Settings) -> Sequence[str]:
        """The command line. Raises EnvironmentFault."""
        raise NotImplementedError

    def request(self, prompt: Prompt, sampling: Sampling) -> Any:
        """Path and JSON body of a request for a reply. Raises BadRequest."""
        raise NotImplementedError

    def part(self, answer: dict[str, Any], tokens: int, sampling: Sampling) -> Part:
        """Parse one answer of the engine; `tokens` came before it."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> None:
        """Wait until it answers. Raises EngineGone if its process ends or takes too long."""
        deadline = time.monotonic() + self.start_seconds
        try:
            while self.is_alive and time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    if (await self._client.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(POLL_SECONDS)
        except asyncio.CancelledError:
            await self.stop()
            raise
        await self.stop()
        raise EngineGone(
            f"{self.title} could not load {self.folder}. Write it again with rlhf export."
        )

    async def generate(self, prompt: Prompt, sampling: Sampling) -> AsyncIterator[Part]:
        """The reply to a prompt: in parts if streamed, else at once. Closing the iterator ends the
        generation. Raises EngineGone.
        """
        path, body = self.request(prompt, sampling)
        tokens = 0
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise EngineGone(f"the engine answered with {response.status_code}")
                async for line in alines(response):
                    if not (text := line.removeprefix("data: ")) or text == "[DONE]":
                        continue
                    found = self.part(json.loads(text), tokens, sampling)
                    tokens = found.tokens
                    yield found
                    if found.finish_reason is not None:
                        return
            raise EngineGone("the engine ended in the middle of a reply")
        except (httpx.TransportError, ValueError, LookupError) as error:
            raise EngineGone(f"the engine does not answer: {type(error).__name__}") from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps `drain` waiting. Enter it as soon as a request has chosen this engine, before any
        await.
        """
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def drain(self) -> None:
        """Stop once no request uses it."""
        while self._users and self.is_alive:
            await asyncio.sleep(POLL_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Kill the process."""
        self._process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self._process.kill()
        self._process.wait()
        await self._client.aclose()


class LlamaCpp(Engine):
    """llama.cpp's server for a GGUF file, prompted with token ids."""

    title = "llama.cpp"

    def command(self, port: int, settings: Settings) -> Sequence[str]:
        file = self.folder / "gguf" / f"model-{settings.weights}.gguf"
        if not file.is_file():
            raise EnvironmentFault(
                f"{file} does not exist. Write it with rlhf export, or serve with --engine "
                "transformers."
            )
        return [
            sys.executable, "-m", "serving.llama_cpp", "--model", str(file), "--port", str(port),
            "--slots", str(settings.slots), "--threads", str(settings.threads),
            "--context-length", str(self.prompts.context_length),
        ]  # fmt: skip

    def request(self, prompt: Prompt, sampling: Sampling) -> Any:
        return "/completion", {
            "prompt": prompt.ids,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "return_tokens": not sampling.stream,
            **_stream_and_seed(sampling),
        }

    def part(self, answer: dict[str, Any], tokens: int, sampling: Sampling) -> Part:
        """A streamed reply arrives as text: llama.cpp holds tokens back until they form whole
        characters, and then reports only the last one.
        """
        reason = "stop" if answer.get("stop_type") == "eos" else "length"
        ids = answer.get("tokens", [])
        timings = answer.get("timings") or {}
        prefill, decode = timings.get("prompt_ms"), timings.get("predicted_ms")
        return Part(
            answer["content"] if sampling.stream else self.prompts.text(ids),
            answer.get("tokens_predicted", 0) if sampling.stream else len(ids),
            reason if answer["stop"] else None,
            None if prefill is None else prefill / 1000,
            None if decode is None else decode / 1000,
        )


class Transformers(Engine):
    """`transformers serve`: any architecture, one reply at a time.

    Without its continuous batching, which draws every reply with the temperature of the first
    request. Prompts go as text: its chat API looks for reasoning in every model of Qwen3's type.
    """

    title = "transformers serve"

    def command(self, port: int, settings: Settings) -> Sequence[str]:
        missing = [
            name
            for name in ("torch", "transformers", "openai")
            if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise EnvironmentFault(
                f"--engine transformers needs the package {missing[0]}. Install it: pip install "
                "-c constraints.txt torch transformers openai."
            )
        return [
            sys.executable, "-m", "transformers.cli.transformers", "serve",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
            str(self.folder.resolve()),
        ]  # fmt: skip

    def request(self, prompt: Prompt, sampling: Sampling) -> Any:
        settings = {
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or 1.0,
            "top_p": sampling.top_p,
            "top_k": 0,
            "max_new_tokens": sampling.max_tokens,
            "eos_token_id": self.prompts.eos,
            "pad_token_id": self.prompts.eos,
        }
        return "/v1/completions", {
            "prompt": self.prompts.text_for(prompt),
            "generation_config": json.dumps(settings),
            **_stream_and_seed(sampling),
        }

    def part(self, answer: dict[str, Any], tokens: int, sampling: Sampling) -> Part:
        choice = answer["choices"][0]
        counted = (answer.get("usage") or {}).get("completion_tokens", tokens + 1)
        return Part(choice["text"], counted, choice.get("finish_reason"))


class Vllm(Engine):
    """`vllm serve` on a GPU, prompted with token ids. It needs its own environment: it and Prefect
    require different versions of FastAPI.
    """

    title = "vLLM"
    start_seconds = 900.0

    def command(self, port: int, settings: Settings) -> Sequence[str]:
        vllm = os.environ.get(VLLM_VARIABLE) or shutil.which("vllm")
        if vllm is None or shutil.which(vllm) is None:
            raise EnvironmentFault(
                f"--engine vllm finds no command vllm ({vllm or 'not on the PATH'}). Install it in "
                f"an environment of its own and name it: {VLLM_VARIABLE}=/path/to/bin/vllm."
            )
        return [
            vllm, "serve", str(self.folder.resolve()), "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", self.name, "--max-num-seqs", str(settings.slots),
            "--max-model-len", str(self.prompts.context_length), "--generation-config", "vllm",
        ]  # fmt: skip

    def request(self, prompt: Prompt, sampling: Sampling) -> Any:
        return "/v1/completions", {
            "model": self.name,
            "prompt": prompt.ids,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True,
            **_stream_and_seed(sampling),
        }

    def part(self, answer: dict[str, Any], tokens: int, sampling: Sampling) -> Part:
        choice = answer["choices"][0]
        ids = choice.get("token_ids") or []
        text = choice["text"] if sampling.stream else self.prompts.text(ids)
        return Part(text, tokens + len(ids), choice.get("finish_reason"))


def _stream_and_seed(sampling: Sampling) -> dict[str, Any]:
    """Fields that all engines name alike."""
    seed = {} if sampling.seed is None else {"seed": sampling.seed}
    return {"stream": sampling.stream, **seed}


ENGINES: dict[EngineName, type[Engine]] = {
    "llama_cpp": LlamaCpp,
    "transformers": Transformers,
    "vllm": Vllm,
}
