"""Makes items in another process, while this one works on those before."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 2000
"""Items handed over together."""


def made_ahead(make: Callable[[], Iterable[T]]) -> Iterator[T]:
    """The items that `make` gives, or its exception, from a fork of this process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(make, there), daemon=True)
    process.start()
    there.close()
    try:
        while items := here.recv():
            if isinstance(items, Exception):
                raise items
            yield from items
    finally:
        here.close()
        process.terminate()
        process.join()


def _send(make: Callable[[], Iterable[T]], pipe: Connection) -> None:
    """Parts of the items, an exception in place of the rest, and an empty part at the end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the stage decides when this ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        items = iter(make())
        while part := list(islice(items, AT_ONCE)):
            pipe.send(part)
    except Exception as error:  # noqa: BLE001 # for the other side
        pipe.send(error)
    pipe.send([])
