"""Ctrl-C, SIGTERM and a cancelled flow are one thing: a request to stop, which the stage at work
answers with a checkpoint.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop, and whether they asked again."""

    def __init__(self) -> None:
        self.requests = 0

    @property
    def made(self) -> bool:
        return self.requests > 0

    @property
    def insisted(self) -> bool:
        """A second request: end at once, and lose what was done since the last checkpoint."""
        return self.requests > 1

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.requests += 1


@contextmanager
def on_signals() -> Iterator[StopRequest]:
    """A request that SIGINT and SIGTERM make while the block runs. In a thread other than the main
    one no signal arrives.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {
        number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
