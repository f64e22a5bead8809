"""An engine: a process on the loopback address that turns prompt token ids into reply token ids."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from config.errors import EnvironmentFault
from config.ports import free_port
from serving.limits import Sampling
from serving.prompts import Prompts

START_SECONDS = 60.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.05


class EngineGone(Exception):
    """The engine's process ended, or does not answer."""


class Part(NamedTuple):
    """What an engine generated since the last one: of a streamed reply a piece of text, of any
    other all its token ids.
    """

    text: str
    ids: list[int]
    tokens: int
    """Generated so far."""
    finish_reason: str | None
    """stop (at EOS) or length; None while more is to come."""


class Engine:
    """llama.cpp's server for one export."""

    def __init__(self, folder: Path, kind: str, slots: int, threads: int) -> None:
        """Start the process; `wait` until it answers. `kind` is f32, q8_0 or q4_0.

        Raises EnvironmentFault if the export has no such file, ModelError if it is damaged.
        """
        self.folder, self.name = folder, folder.name
        self.prompts = Prompts(folder)
        self._users = 0
        file = folder / "gguf" / f"model-{kind}.gguf"
        if not file.is_file():
            raise EnvironmentFault(f"{file} does not exist. Write it with rlhf export.")
        port, key = free_port(), secrets.token_urlsafe(16)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "serving.llama_cpp", "--model", str(file),
                "--port", str(port), "--slots", str(slots), "--threads", str(threads),
                "--context-length", str(self.prompts.context_length),
            ],
            env={**os.environ, "RLHF_ENGINE_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=None,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> None:
        """Until it answers. Raises EngineGone if its process ends or takes over a minute."""
        deadline = time.monotonic() + START_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if (await self._client.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(POLL_SECONDS)
        await self.stop()
        raise EngineGone(
            f"llama.cpp could not load {self.folder}. Write it again with rlhf export."
        )

    async def generate(self, ids: list[int], sampling: Sampling) -> AsyncIterator[Part]:
        """The reply to a prompt: as it comes if it is streamed, else at once. Closing the iterator
        ends the generation. Raises EngineGone.

        A streamed reply comes as text, since llama.cpp holds tokens back until they make whole
        characters, and then names the last one only.
        """
        request = {
            "prompt": ids,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "return_tokens": not sampling.stream,
            "stream": sampling.stream,
            **({"seed": sampling.seed} if sampling.seed is not None else {}),
        }
        try:
            async with self._client.stream("POST", "/completion", json=request) as response:
                if response.status_code != 200:
                    raise EngineGone(f"the engine answered with {response.status_code}")
                async for line in response.aiter_lines():
                    if not (text := line.removeprefix("data: ")):
                        continue
                    part = json.loads(text)
                    reason = "stop" if part.get("stop_type") == "eos" else "length"
                    yield Part(
                        part.get("content", ""),
                        part.get("tokens", []),
                        part.get("tokens_predicted", 0),
                        reason if part["stop"] else None,
                    )
                    if part["stop"]:
                        return
            raise EngineGone("the engine ended in the middle of a reply")
        except (httpx.TransportError, ValueError, KeyError) as error:
            raise EngineGone(f"the engine does not answer: {type(error).__name__}") from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps `drain` waiting. Enter it when a request has chosen this engine, before anything
        else is awaited.
        """
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def drain(self) -> None:
        """Stop once nobody uses it any more."""
        while self._users and self.is_alive:
            await asyncio.sleep(POLL_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """End the process, whatever it is at."""
        self._process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self._process.kill()
        self._process.wait()
        await self._client.aclose()
