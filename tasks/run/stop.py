"""Ctrl-C, SIGTERM, a lost terminal and a cancelled flow are one thing: a request to stop.

The stage at work answers it with a checkpoint.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        if (
            signum == signal.SIGHUP
        ):  # a terminal that goes away says so more than once, and insists on nothing
            self.requests = max(1, self.requests)
        else:
            self.requests += 1


@contextmanager
def on_signals() -> Iterator[StopRequest]:
    """A request that SIGINT, SIGTERM and SIGHUP make while the block runs; what nohup ignores stays
    ignored.

    In a thread other than the main one no signal arrives.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request.handle) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
