"""Child processes of a run: each leads a process group of its own, appends what it prints to a log, and is stopped in
one way.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from config.alive import created, now
from config.errors import EXIT_BAD_INPUT, EXIT_OVER_BUDGET, OverBudget, RlhfError, UserError
from config.locks import CHECKPOINT_SECONDS
from config.records import PIPELINE_VARIABLE
from tasks.dvc.status import environment
from tasks.run.stop import StopRequest

POLL_SECONDS = 0.2


class Ended(NamedTuple):
    """How a process ended."""

    pid: int
    code: int
    """Its exit code; of one that a signal killed, minus the signal."""
    lived_seconds: float
    output: str


def run_process(
    command: Sequence[str],
    folder: Path,
    log: Path,
    stop: StopRequest,
    look: Callable[[int], bool] = lambda pid: False,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run `command` in `folder` to its end; what it prints is appended to `log`.

    `look` is called several times a second with the process id; it returns whether the process must stop. A stop sends
    SIGTERM once, a second request kills the whole group. If `look` raises, the process may still write its checkpoint.
    If this process is killed, a stage notices by itself.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    added = {PIPELINE_VARIABLE: f"{os.getpid()}:{created(os.getpid())}", **(variables or {})}
    began = now()
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**added),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it only through us
            close_fds=False,  # it inherits the locks that we hold: see config/locks.py
        )
    stop.group = process.pid
    try:
        code = _wait(process, stop, look)
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(CHECKPOINT_SECONDS)
        raise
    finally:
        stop.group = 0
        _kill(process)
    lived = now() - began
    with log.open("rb") as file:
        file.seek(start)
        output = file.read().decode(errors="replace")
    return Ended(process.pid, code, lived, output)


def require_done(module: str, ended: Ended, log: Path) -> None:
    """Raise UserError with the last line of a module that refused its input, and RlhfError for any other end but a
    good one.
    """
    if ended.code == EXIT_BAD_INPUT:
        raise UserError(last_line(ended.output))
    if ended.code == EXIT_OVER_BUDGET:
        raise OverBudget(last_line(ended.output))
    if ended.code:
        raise RlhfError(
            f"{module} ended with exit code {ended.code}: {last_line(ended.output)} All it printed is in {log}."
        )


def _wait(process: "subprocess.Popen[bytes]", stop: StopRequest, look: Callable[[int], bool]) -> int:
    """Its exit code, once it has ended."""
    stopping = False
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            must_stop = look(process.pid) or stop.requested
        if stop.force:
            _kill(process)
        elif must_stop and not stopping:
            stopping = True
            process.terminate()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """The process and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(output: str) -> str:
    """The last line that is not empty."""
    lines = output.strip().splitlines()
    return lines[-1] if lines else "it printed nothing."
