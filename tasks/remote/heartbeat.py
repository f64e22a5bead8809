"""Heartbeats over an exchange: each side writes a growing count, the other checks that it grows. No clocks are
compared.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from config.errors import EnvironmentFault
from tasks.run.exchange import Exchange

PIPELINE, CONTAINER = "pipeline.alive", "container.alive"
EVERY_SECONDS = 10.0
SILENCE_SECONDS = 300.0
"""Seconds after which a container considers its pipeline gone. A pipeline that comes back continues in a new one."""
GONE_SECONDS = 90.0
"""Seconds after which a new pipeline considers the container of an earlier one gone."""


class Heartbeat:
    """The sign of life of one side."""

    def __init__(self, exchange: Exchange, name: str, every_seconds: float) -> None:
        self._exchange, self._name, self._every_seconds = exchange, name, every_seconds
        self._count = itertools.count(1)
        self._due = 0.0

    def show(self) -> None:
        """Write the next count if it is time to. Raises EnvironmentFault if the store cannot be reached."""
        if time.monotonic() >= self._due:
            self._exchange.write(self._name, str(next(self._count)).encode())
            self._due = time.monotonic() + self._every_seconds


class HeartbeatMonitor:
    """Seconds since the other side's last new count."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Look, and say how long it lasts. Raises EnvironmentFault if the store cannot be reached: no heartbeat can
        arrive then, and the count starts over.
        """
        try:
            content = self._exchange.read(self._name)
        except EnvironmentFault:
            self._since = time.monotonic()
            raise
        if content != self._seen:
            self._seen, self._since = content, time.monotonic()
        return time.monotonic() - self._since


@contextmanager
def heartbeats(
    exchange: Exchange, every_seconds: float, silence_seconds: float, on_silence: Callable[[], None]
) -> Iterator[None]:
    """Show the container's sign while the block runs, and call `on_silence` once the pipeline's has not changed for so
    long.
    """
    sign, silence, ended = (
        Heartbeat(exchange, CONTAINER, every_seconds),
        HeartbeatMonitor(exchange, PIPELINE),
        threading.Event(),
    )

    def work() -> None:
        reported = False
        while not ended.is_set():
            try:
                if silence.seconds() > silence_seconds and not reported:
                    reported = True
                    on_silence()
                sign.show()
            except EnvironmentFault:
                pass  # of a store that is away, the sender of the rows warns
            ended.wait(every_seconds)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
