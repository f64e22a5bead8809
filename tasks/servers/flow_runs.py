"""Processes of flow runs in this checkout: they are found, and stopped before their server."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from config.locks import CHECKPOINT_SECONDS


def runs_at_work(root: Path) -> list[psutil.Process]:
    """The processes of runs in this checkout: of a worker, which they may have outlived, or of a terminal."""
    flow_runs = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if is_run(process.cmdline()) and Path(process.cwd()) == root.resolve():
                flow_runs.append(process)
    return flow_runs


def is_run(command: Sequence[str]) -> bool:
    """Whether a command line is that of a flow run: a worker's, or `rlhf run` and `rlhf retrain`."""
    if "prefect.engine" in command:
        return True
    program = next((i for i, word in enumerate(command[:4]) if word == "cli.main" or Path(word).name == "rlhf"), None)
    return program is not None and any(word in ("run", "retrain") for word in command[program + 1 : program + 2])


def end_runs(root: Path) -> None:
    """Ask each run once: a second request, which the worker passes on as it ends, would make it end without a
    checkpoint.
    """
    runs = runs_at_work(root)
    for run in runs:
        with suppress(psutil.NoSuchProcess):
            run.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + CHECKPOINT_SECONDS
    while any(map(_is_at_work, runs)) and time.monotonic() < deadline:
        time.sleep(0.2)


def _is_at_work(process: psutil.Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
