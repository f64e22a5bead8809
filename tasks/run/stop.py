"""Ctrl-C, SIGTERM, a lost terminal and a cancelled flow are one thing: a request to stop.

The running stage answers it with a checkpoint.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED, OVER_BUDGET = "Stopped", "OverBudget"
"""States of a run, and of its stage, that was stopped or has reached its budget: resumable."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether a stop was requested, and whether it was requested again."""

    def __init__(self) -> None:
        self.requests = 0
        self.group = 0
        """Process group of the running stage; 0 without one."""

    @property
    def requested(self) -> bool:
        return self.requests > 0

    @property
    def force(self) -> bool:
        """A second request: end at once, and lose the work since the last checkpoint."""
        return self.requests > 1

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:  # a lost terminal sends it more than once without meaning it
            self.requests = max(1, self.requests)
        else:
            self.requests += 1

    def suspend(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the stage stops with us, else it would train on without a budget; both continue together."""
        self._signal_group(signal.SIGSTOP)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we are continued
        signal.signal(signal.SIGTSTP, before)
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.group:
                os.killpg(self.group, number)


@contextmanager
def on_signals(interactive: bool = True) -> Iterator[StopRequest]:
    """A request that SIGINT, SIGTERM and SIGHUP make while the block runs; what nohup ignores stays ignored.

    Blocks within one another share the request. `interactive` False leaves Ctrl-C as it is.
    In a thread other than the main one no signal arrives.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    request = outer if isinstance(outer, StopRequest) else StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    wanted = SIGNALS if interactive else (signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request.handle) for number in caught}
    if interactive:
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, request.suspend)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C while the block runs, where they would else end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
