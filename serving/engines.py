"""An engine: a process on the loopback address that speaks OpenAI's HTTP API. It renders, tokenises, samples and
answers.
"""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import aiohttp

from config.child import BOUND, vllm_command
from config.errors import EnvironmentFault, ModelError
from config.ports import free_port
from config.workspace.exported import gguf_path, read_exported
from serving.settings import QUEUE, EngineName, Settings

STOP_SECONDS = 5.0
POLL_SECONDS = 0.05


class EngineGone(Exception):
    """The engine's process ended, or does not answer."""


class Engine:
    """The process of one export. Subclasses define how it is started."""

    title: ClassVar[str]
    start_seconds: ClassVar[float] = 60.0

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Start the process, within an event loop; `wait` until it answers.

        Raises EnvironmentFault if the engine is not installed, ModelError for an export that is damaged or that the
        engine does not serve as it was trained.
        """
        self.folder, self.name, self.settings = folder, folder.name, settings
        self.export = read_exported(folder)
        self.control_tokens = re.compile("|".join(map(re.escape, self.export.control_tokens)))
        self._users = 0
        port, key = free_port(), secrets.token_urlsafe(16)
        self._process = subprocess.Popen(
            [*BOUND, *self.command(port)],
            env={**os.environ, "RLHF_ENGINE_KEY": key, "VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the front, which answers before it stops
        )
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(),
            # a connection that is kept may close as a request is sent, which is then lost
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            read_bufsize=2**20,
        )

    def command(self, port: int) -> Sequence[str]:
        """The command line. Raises EnvironmentFault or ModelError."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> None:
        """Wait until it answers. Raises EngineGone if its process ends or takes too long."""
        deadline = time.monotonic() + self.start_seconds
        try:
            while self.is_alive and time.monotonic() < deadline:
                with suppress(aiohttp.ClientError):
                    async with self._session.get("/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(POLL_SECONDS)
        except asyncio.CancelledError:
            await self.stop()
            raise
        await self.stop()
        raise EngineGone(f"{self.title} could not load {self.folder}. Write it again with rlhf export.")

    def post(self, path: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request; leaving the context before the end of the answer ends the generation."""
        return self._session.post(path, data=body)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps `drain` waiting. Enter it as soon as a request has chosen this engine, before any await."""
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
        """Kill the process, and what it started."""
        self._process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        await self._session.close()


class LlamaCpp(Engine):
    """llama.cpp's server for a GGUF file."""

    title = "llama.cpp"

    def command(self, port: int) -> Sequence[str]:
        file = gguf_path(self.folder, self.settings.weights)
        if self.export.differs:
            raise ModelError(
                f"{self.folder} is not served with llama.cpp, which does not do what training did: "
                f"{self.export.differs[0]} Serve it with --engine vllm."
            )
        if not file.is_file():
            raise EnvironmentFault(f"{file} does not exist. Write it with rlhf export, or serve with --engine vllm.")
        return [
            sys.executable, "-m", "serving.llama_cpp", "--model", str(file), "--port", str(port),
            "--slots", str(self.settings.slots), "--threads", str(self.settings.threads),
            "--context-length", str(self.export.context_length), "--name", self.name,
            "--connections", str(self.settings.slots + QUEUE),
        ]  # fmt: skip


class Vllm(Engine):
    """`vllm serve`. It needs its own environment: it and Prefect require different versions of FastAPI."""

    title = "vLLM"
    start_seconds = 900.0

    def command(self, port: int) -> Sequence[str]:
        return [
            vllm_command("--engine vllm"), "serve", str(self.folder.resolve()),
            "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", self.name, "--max-num-seqs", str(self.settings.slots),
            "--max-model-len", str(self.export.context_length), *self.settings.arguments,
        ]  # fmt: skip


ENGINES: dict[EngineName, type[Engine]] = {"llama_cpp": LlamaCpp, "vllm": Vllm}
