"""A file lock held by one process; it is released when the process ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from config.errors import EnvironmentFault

WAIT_SECONDS = 1.0
"""Seconds between attempts to get the lock."""


@contextmanager
def lock_file(path: Path, wait: Callable[[str], bool] | None = None) -> Iterator[str | None]:
    """Hold `path`, in a folder of the project; yields None, or the id of the process that holds it
    already (`?` if it does not say).

    `wait` is asked again and again, with that id, whether to wait for it. Raises EnvironmentFault
    if the file cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written ({error.strerror}). Make {path.parent.parent} writable for "
            "this user."
        ) from None
    with file:
        while not _taken(file):
            file.seek(0)
            holder = file.read().strip() or "?"
            if wait is None or not wait(holder):
                yield holder
                return
            time.sleep(WAIT_SECONDS)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield None


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
