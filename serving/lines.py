"""Lines of a stream. httpx splits at every Unicode line break, and the text of a token may contain
one.
"""

from collections.abc import AsyncIterator, Iterator

import httpx


class _Lines:
    """Splits bytes at line feeds."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, content: bytes) -> list[str]:
        """The lines completed by `content`."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode().rstrip("\r") for line in lines]

    def last(self) -> list[str]:
        """The rest, at the end of the stream."""
        return [self._rest.decode()] if self._rest else []


def lines(response: httpx.Response) -> Iterator[str]:
    """Lines of a response, read as it arrives. Raises httpx.HTTPError."""
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
