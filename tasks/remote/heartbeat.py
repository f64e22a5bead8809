"""Heartbeats over an exchange: each side writes a count there that grows, the other looks
whether it does. No clocks are compared.
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
"""After which a container takes its pipeline for gone. A pipeline that comes back goes on in a new
one.
"""
GONE_SECONDS = 90.0
"""After which a new pipeline takes the container of an earlier one for gone."""


class Heartbeat:
    """What one side shows."""

    def __init__(self, exchange: Exchange, name: str, every_seconds: float) -> None:
        self._exchange, self._name, self._every_seconds = exchange, name, every_seconds
        self._count = itertools.count(1)
        self._due = 0.0

    def show(self) -> None:
        """Write the next count if it is time to. Raises EnvironmentFault if the store cannot be
        reached.
        """
        if time.monotonic() >= self._due:
            self._exchange.write(self._name, str(next(self._count)).encode())
            self._due = time.monotonic() + self._every_seconds


class HeartbeatMonitor:
    """How long the other side has shown nothing new."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Look, and say how long it lasts. Raises EnvironmentFault if the store cannot be reached:
        nobody can be heard then, and it begins anew.
        """
        try:
            seen = self._exchange.read(self._name)
        except EnvironmentFault:
            self._since = time.monotonic()
            raise
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since


@contextmanager
def heartbeats(
    exchange: Exchange, every_seconds: float, silence_seconds: float, on_silence: Callable[[], None]
) -> Iterator[None]:
    """Show the container's sign while the block runs, and call `on_silence` once the pipeline's has
    not changed for so long.
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
