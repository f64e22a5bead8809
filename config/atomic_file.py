"""A file that is replaced whole or not at all."""

import itertools
import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary place beside `path` and rename; text as UTF-8. Whoever reads sees the
    old file or the new one.

    Its folder has to be there. Raises OSError, and leaves the old file, if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it is gone if all went well
            temporary.unlink()


def keep_copy(path: Path) -> Path:
    """Copy a file that will be replaced to NAME.bak, NAME.bak2 ... beside it, and return the copy.
    No earlier copy is replaced, and one with the same content serves again. Raises OSError.
    """
    content = path.read_bytes()
    numbers = itertools.chain([""], itertools.count(2))
    copies = (path.with_name(f"{path.name}.bak{number}") for number in numbers)
    copy = next(each for each in copies if not each.exists() or each.read_bytes() == content)
    if not copy.exists():
        write_atomically(copy, content)
    return copy
