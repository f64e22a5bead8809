"""Starts a server to measure, and samples its memory."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from config.errors import EnvironmentFault
from config.ports import free_port

START_SECONDS = 900.0
"""Seconds to start; a run without an export is exported first."""
SAMPLE_SECONDS = 0.2


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server with `command` and --port, and stop it after the block; yields its API's
    address and its process once it is up. It ends with this process, however that ends.

    Raises EnvironmentFault with its last line if it does not come up.
    """
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.bound", *command, "--port", str(port)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is meant for the load test
    )
    try:
        _await(process, port)
        yield f"http://127.0.0.1:{port}/v1", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


def _await(process: "subprocess.Popen[str]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = (process.communicate()[1] or "").strip().splitlines()
            last = lines[-1].removeprefix("rlhf: ") if lines else "it ended with no message"
            raise EnvironmentFault(f"the server did not start: {last}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise EnvironmentFault(f"the server is not up after {START_SECONDS:.0f} s.")


@contextmanager
def peak_bytes(process: psutil.Process | None) -> Iterator[Callable[[], int | None]]:
    """Peak resident memory of a process and its children during the block."""
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while process is not None and not done.wait(SAMPLE_SECONDS):
            try:
                family = (process, *process.children(recursive=True))
                most = max(most, sum(each.memory_info().rss for each in family))
            except psutil.Error:
                continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most or None
    finally:
        done.set()
        watcher.join()
