"""Starts a server to measure, and samples its memory."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from config.child import BOUND
from config.errors import EnvironmentFault
from config.ports import free_port

SAMPLE_SECONDS = 0.2


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a front with `command` and --port, and stop it after the block; yields its API's address and its process
    once it says that it serves. It ends with this process, however that ends.

    Raises EnvironmentFault with its last line if it does not come up.
    """
    port = free_port()
    process = subprocess.Popen(
        [*BOUND, *command, "--port", str(port)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is meant for the load test
    )
    assert process.stdout is not None
    try:
        if not any(line.startswith("Serving ") for line in process.stdout):
            lines = process.communicate()[1].strip().splitlines() or ["it ended with no message"]
            raise EnvironmentFault(f"the server did not start: {lines[-1].removeprefix('rlhf: ')}")
        yield f"http://127.0.0.1:{port}/v1", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


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
                most = max(most, sum(process.memory_info().rss for process in family))
            except psutil.Error:
                continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most or None
    finally:
        done.set()
        watcher.join()
