"""Who is answered by the wrapper of Prefect's server, under addresses that are named."""

import asyncio

import httpx
import pytest

from tasks.servers.prefect_server import OwnAddressOnly, own_addresses

STACK = ["prefect:4200", "127.0.0.1:4300"]


async def inner(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"inside"})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("addresses", "host", "origin", "status"),
    [
        (STACK, "prefect:4200", None, 200),
        (STACK, "127.0.0.1:4300", "http://127.0.0.1:4300", 200),
        (STACK, "127.0.0.1:4200", None, 403),
        (STACK, "127.0.0.1:4300", "http://foreign.example", 403),
        (STACK, "foreign.example:4200", None, 403),
        (own_addresses(4200), "localhost:4200", "http://localhost:4200", 200),
        (own_addresses(4200), "prefect:4200", None, 403),
    ],
)
def test_only_its_own_names_and_pages_are_answered(
    addresses: list[str], host: str, origin: str | None, status: int
) -> None:
    async def ask() -> int:
        within = OwnAddressOnly(inner, addresses)
        transport = httpx.ASGITransport(app=within)  # type: ignore[arg-type]
        headers = {"Host": host} | ({"Origin": origin} if origin else {})
        async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
            return (await client.get("/", headers=headers)).status_code

    assert asyncio.run(ask()) == status
