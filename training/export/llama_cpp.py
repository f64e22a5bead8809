"""Replies of a GGUF file from llama.cpp, the engine that serves it, in a separate process."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config.child import BOUND
from config.errors import ModelError
from config.ports import free_port

SLOTS = 4
"""Replies generated in parallel."""
POLL_SECONDS = 0.02


class Server(NamedTuple):
    """Where an engine listens, and its key."""

    address: str
    key: str

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; {} if it is refused."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), headers)
        try:
            with _opener().open(request, timeout=600) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError:
            return {}
        return answer


@contextmanager
def serving(file: Path, context_length: int, connections: int = SLOTS) -> Iterator[Server]:
    """A server for the model in `file`, each slot with the full context length.

    Raises ModelError if llama.cpp cannot load the file.
    """
    port, key = free_port(), secrets.token_urlsafe(16)
    command = [*BOUND, sys.executable, "-m", "serving.llama_cpp", "--model", str(file)]
    command += ["--port", str(port), "--slots", str(SLOTS), "--context-length", str(context_length)]
    command += ["--threads", str(torch.get_num_threads()), "--name", file.stem]
    command += ["--connections", str(connections)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "RLHF_ENGINE_KEY": key},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Linux shares processors between sessions; its threads spin
    )
    try:
        server = Server(f"http://127.0.0.1:{port}", key)
        while not _is_up(server):
            if process.poll() is not None:
                raise ModelError(f"llama.cpp cannot load {file.name}: it exited with code {process.returncode}.")
            time.sleep(POLL_SECONDS)
        yield server
    finally:
        process.kill()
        process.wait()


def _opener() -> urllib.request.OpenerDirector:
    """Bypass proxies of the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _is_up(server: Server) -> bool:
    try:
        with _opener().open(f"{server.address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def greedy_replies(server: Server, prompts: Sequence[list[int]], max_new_tokens: int, eos: int) -> list[list[int]]:
    """The most likely reply to each prompt, as token ids, with EOS if it ended."""

    def reply(prompt: list[int]) -> list[int]:
        request = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "return_tokens": True}
        answer = server.post("/completion", request)
        tokens: list[int] = answer["tokens"]
        return [*tokens, eos] if answer["stop_type"] == "eos" and tokens[-1:] != [eos] else tokens

    with ThreadPoolExecutor(SLOTS) as threads:
        return list(threads.map(reply, prompts))
