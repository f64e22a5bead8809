"""File locks. A lock is held until the process that took it and every stage that it started have ended. A stage
inherits the lock, so that nobody else writes to the workspace while the stage of a killed run is still writing.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from config.alive import is_running
from config.errors import EnvironmentFault

WAIT_SECONDS = 1.0
"""Seconds between attempts to get the lock."""
CHECKPOINT_SECONDS = 600.0
"""Longest time for a stage to finish its step and write a checkpoint."""


@contextmanager
def lock_file(path: Path, wait: Callable[[str], bool] | None = None) -> Iterator[str | None]:
    """Hold `path`, in a folder of the project; yields None, or the id of the process that holds it already (`?` if the
    file does not say).

    `wait` is called again and again with that id: whether to wait for it. What a process that is gone has started is
    always waited for. Raises EnvironmentFault if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written ({error.strerror}). Make {path.parent.parent} writable for this user."
        ) from None
    with file:
        killed_at = None
        while not _try_lock(file):
            holder = _holder(file)
            if holder == "?" or is_running(int(holder)):
                if wait is None or not wait(holder):
                    yield holder
                    return
            elif killed_at is None:
                killed_at = time.monotonic()
                sys.stderr.write(
                    f"process {holder} was killed, and a stage that it started is still running: "
                    "waiting for its checkpoint.\n"
                )
            elif time.monotonic() > killed_at + CHECKPOINT_SECONDS:
                yield holder
                return
            time.sleep(WAIT_SECONDS)
        os.set_inheritable(file.fileno(), True)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield None


def _holder(file: IO[str]) -> str:
    file.seek(0)
    content = file.read().strip()
    return content if content.isdigit() else "?"


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on this file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it never existed, or is not readable for us
        return False
    return False
