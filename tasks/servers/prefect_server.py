"""Prefect's server, answering only requests under its own address from its own pages.

Prefect checks a key and a CSRF token, but not under which name it is asked: a page whose name resolves to 127.0.0.1
(DNS rebinding) has its origin. `python -m tasks.servers.prefect_server PORT` listens on the loopback address; what the
server knows else is in its environment, see `tasks.servers.plans.prefect_plan`. With `--temporary` it is the temporary
server of a command, and ends with its input. In a container it listens on every address of the container, and its
addresses are named (`--listen 0.0.0.0 --address NAME:PORT ...`).
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from config.ports import HOST

NAMES = (HOST, "localhost")
"""Names of this machine in a browser."""
GRACE_SECONDS = 5
"""Time for open requests when the server is asked to stop; pages in a browser would hold it forever."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def own_addresses(port: int) -> list[str]:
    return [f"{name}:{port}" for name in NAMES]


def own_origins(port: int) -> list[str]:
    return [f"http://{address}" for address in own_addresses(port)]


class OwnAddressOnly:
    """An ASGI application that refuses requests for another Host or from another Origin before the application within
    sees them; `addresses` are the `name:port` under which it is asked.

    Answers carry a policy with which a browser loads nothing from elsewhere (Prefect's pages measure their users) and
    shows no page of this server inside of another site's.
    """

    def __init__(self, within: Application, addresses: Sequence[str]) -> None:
        self._within = within
        self._hosts = {address.encode() for address in addresses}
        self._origins = {b"http://" + host for host in self._hosts}
        sources = " ".join(addresses)
        policy = (
            "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' "
            f"{sources}; frame-ancestors 'none'; form-action 'self'"
        )
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"referrer-policy", b"same-origin"),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
        ]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # start and end of the application
            await self._within(scope, receive, send)
        elif not self._is_ours(scope["headers"]):
            await self._refuse(scope, send)
        else:
            await self._within(scope, receive, self._with_headers(send))

    def _is_ours(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the request names this server, and comes from its own pages or from no page."""
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        return len(hosts) == 1 and hosts[0] in self._hosts and all(origin in self._origins for origin in origins)

    async def _refuse(self, scope: Message, send: Send) -> None:
        if scope["type"] == "websocket":
            # before it was accepted: answered with 403
            await send({"type": "websocket.close", "code": 1008})
            return
        body = (
            f"This server answers as {' or '.join(sorted(host.decode() for host in self._hosts))}, "
            "to its own pages only."
        )
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    def _with_headers(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        return sending


def end_with_input() -> None:
    """Stop this process once whoever started it has closed its input, or is gone: also if it was killed."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    import uvicorn  # these take two seconds
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    from tasks.servers.prefect_database import writers_wait

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--temporary", action="store_true", help="end when standard input is closed")
    parser.add_argument("--listen", default=HOST, help="address of this machine to listen on")
    parser.add_argument("--address", nargs="+", help="name:port under which the server is asked")
    options = parser.parse_args()
    if options.temporary:
        end_with_input()
    writers_wait()
    api = get_current_settings().server.api
    uvicorn.run(
        OwnAddressOnly(create_app(final=True), options.address or own_addresses(options.port)),
        host=options.listen, port=options.port, log_level="warning",
        timeout_keep_alive=api.keepalive_timeout, timeout_graceful_shutdown=GRACE_SECONDS,
        ws_ping_interval=api.websocket_ping_interval, ws_ping_timeout=api.websocket_ping_timeout,
    )  # fmt: skip


if __name__ == "__main__":
    main()
