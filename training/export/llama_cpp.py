"""Replies of a GGUF file from llama.cpp, the engine that serves it, in a separate process."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from config.errors import ModelError
from config.ports import free_port

SLOTS = 4
"""Replies generated in parallel."""
POLL_SECONDS = 0.02


class Server(NamedTuple):
    """Where an engine listens, and its key."""

    address: str
    key: str


@contextmanager
def serving(file: Path, context_length: int) -> Iterator[Server]:
    """A server for the model in `file`, each slot with the full context length.

    Raises ModelError if llama.cpp cannot load the file.
    """
    port, key = free_port(), secrets.token_urlsafe(16)
    command = [sys.executable, "-m", "serving.bound"]
    command += [sys.executable, "-m", "serving.llama_cpp", "--model", str(file)]
    command += ["--port", str(port), "--slots", str(SLOTS), "--context-length", str(context_length)]
    command += ["--threads", str(torch.get_num_threads())]
    process = subprocess.Popen(
        command,
        env={**os.environ, "RLHF_ENGINE_KEY": key},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        server = Server(f"http://127.0.0.1:{port}", key)
        while not _is_up(server):
            if process.poll() is not None:
                raise ModelError(
                    f"llama.cpp cannot load {file.name}: it exited with code {process.returncode}."
                )
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


def greedy_replies(
    server: Server, prompts: Sequence[list[int]], max_new_tokens: int, eos: int
) -> list[list[int]]:
    """The most likely reply to each prompt, as token ids, with EOS if it ended."""

    def reply(prompt: list[int]) -> list[int]:
        request = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "return_tokens": True,
        }
        with _opener().open(
            urllib.request.Request(
                f"{server.address}/completion",
                json.dumps(request).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"},
            ),
            timeout=600,
        ) as response:
            answer = json.load(response)
        tokens: list[int] = answer["tokens"]
        return [*tokens, eos] if answer["stop_type"] == "eos" and tokens[-1:] != [eos] else tokens

    with ThreadPoolExecutor(SLOTS) as threads:
        return list(threads.map(reply, prompts))
