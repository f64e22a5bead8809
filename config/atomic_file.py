"""A file that is replaced whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary place beside `path` and rename; text as UTF-8. Whoever reads sees the
    old file or the new one.

    Its folder has to be there. Raises OSError, and leaves the old file, if it can not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it is gone if all went well
            temporary.unlink()
