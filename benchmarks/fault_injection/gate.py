"""Hands connections on from one port of this machine to another, until it is killed: `python -m
benchmarks.fault_injection.gate FROM TO`.
"""

import asyncio
import sys

HOST = "127.0.0.1"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def serve(outer: int, inner: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, inner)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(connect, HOST, outer) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
