"""Atomic replacement of a file."""

import itertools
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary place beside `path` and rename; text as UTF-8. Readers see the old file or the new one,
    never a part.

    The folder must exist. Raises OSError and keeps the old file if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # already renamed if all went well
            temporary.unlink()


def keep_copy(path: Path) -> Path:
    """Copy a file that will be replaced to NAME.bak, NAME.bak2 ... beside it, and return the copy. Earlier copies are
    kept, and one with the same content is reused. Raises OSError.
    """
    content = path.read_bytes()
    numbers = itertools.chain([""], itertools.count(2))
    copies = (path.with_name(f"{path.name}.bak{number}") for number in numbers)
    copy = next(path for path in copies if not path.exists() or path.read_bytes() == content)
    if not copy.exists():
        write_atomically(copy, content)
    return copy
