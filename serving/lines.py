"""The lines of a stream. httpx ends a line at every character that Unicode calls a line break, and
the text of a token may hold one.
"""

from collections.abc import AsyncIterator, Iterator

import httpx


class _Lines:
    """Cuts bytes at line feeds."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, content: bytes) -> list[str]:
        """The lines that `content` completes."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode().rstrip("\r") for line in whole]

    def last(self) -> list[str]:
        """What is left at the end."""
        return [self._rest.decode()] if self._rest else []


def lines(response: httpx.Response) -> Iterator[str]:
    """Of a response that is read as it comes. Raises httpx.HTTPError."""
    cutter = _Lines()
    for content in response.iter_bytes():
        yield from cutter.cut(content)
    yield from cutter.last()


async def alines(response: httpx.Response) -> AsyncIterator[str]:
    """The same, asynchronously."""
    cutter = _Lines()
    async for content in response.aiter_bytes():
        for line in cutter.cut(content):
            yield line
    for line in cutter.last():
        yield line
