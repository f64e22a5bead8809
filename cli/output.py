"""Output that may lose its reader: `rlhf run | head -1`, a closed terminal. The command finishes its work, and its
exit code is that of the work.
"""

import errno
import io
import os
import sys
from typing import Any


class Output(io.FileIO):
    """A file descriptor whose output is dropped once its reader is gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._was_terminal = os.isatty(descriptor)

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            closed = error.errno == errno.EIO and self._was_terminal
            if error.errno != errno.EPIPE and not closed:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # child processes inherit it
            os.close(nowhere)
            return memoryview(content).nbytes


def survive_closed_output() -> None:
    """Keep this process running when the reader of its output goes away. Call it before anything is printed or keeps
    sys.stdout or sys.stderr, as libraries do at import.
    """
    sys.stdout, sys.stderr = surviving(sys.stdout), surviving(sys.stderr)


def surviving(stream: Any) -> Any:
    """A stream like `stream` on the same descriptor, or `stream` itself if it has none."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed, or a buffer in memory
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(Output(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
