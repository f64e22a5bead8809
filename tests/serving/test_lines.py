"""Only line feeds end a line."""

import asyncio

import httpx

from serving.lines import alines, lines

TEXT = 'data: {"content": "a\u2028b\u0085c\x0b\x1cd"}\n\ndata: [DONE]'
"""With characters at which str.splitlines cuts."""
CHUNKS = [TEXT.encode()[place : place + 7] for place in range(0, len(TEXT.encode()), 7)]
"""Cut within characters."""
WANTED = ['data: {"content": "a\u2028b\u0085c\x0b\x1cd"}', "", "data: [DONE]"]


def test_a_line_is_whole_whatever_it_holds() -> None:
    assert list(lines(httpx.Response(200, content=iter(CHUNKS)))) == WANTED
    ending = [b"one\r\n", b"two\n"]
    assert list(lines(httpx.Response(200, content=iter(ending)))) == ["one", "two"]


def test_the_same_asynchronously() -> None:
    async def read() -> list[str]:
        async def chunks():  # type: ignore[no-untyped-def]
            for chunk in CHUNKS:
                yield chunk

        return [line async for line in alines(httpx.Response(200, content=chunks()))]

    assert asyncio.run(read()) == WANTED
