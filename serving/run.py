"""A whole front in one process, until SIGTERM or Ctrl-C: engine, application, server."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from config.errors import EnvironmentFault
from config.workspace.login import SERVE_KEY, key
from serving.account import Account
from serving.engines import ENGINES, POLL_SECONDS, EngineGone
from serving.front import Front
from serving.settings import Address, Settings
from serving.swap import Swap

QUEUE = 64
"""Requests that may wait for a slot."""
DRAIN_SECONDS = 60


def serve(
    root: Path,
    address: Address,
    wanted: Callable[[], Path],
    settings: Settings,
    account: Account,
    say: Callable[[str], None],
) -> None:
    """Serve the export that `wanted` names.

    Raises EnvironmentFault if the port is in use or the engine does not start.
    """
    (root / SERVE_KEY).parent.mkdir(exist_ok=True)
    secret = key(root / SERVE_KEY)
    with _listening(address) as listener:
        swap = Swap(
            wanted, lambda folder: ENGINES[settings.engine](folder, settings), account.serves
        )
        front = Front(swap, secret, address.hosts, settings.slots + QUEUE, account)
        try:
            asyncio.run(_serve(listener, address, swap, wanted(), secret, front, say))
        finally:
            account.record()


async def _serve(
    listener: socket.socket,
    address: Address,
    swap: Swap,
    first: Path,
    secret: str,
    front: Front,
    say: Callable[[str], None],
) -> None:
    config = uvicorn.Config(
        front.app(), log_level=logging.WARNING, access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def stop(*_: Any) -> None:
        server.should_exit = True

    # until uvicorn installs its handlers, and when it re-raises the signal at its end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    begin = asyncio.create_task(swap.begin(first))
    while not (begin.done() or server.should_exit):
        await asyncio.wait({begin}, timeout=POLL_SECONDS)
    if not begin.done():
        begin.cancel()
        await asyncio.wait({begin})
        return
    try:
        await begin
    except EngineGone as error:
        raise EnvironmentFault(str(error)) from None
    say(f"Serving {first.name} at http://127.0.0.1:{address.port}/v1")
    # the output of a background process goes to a log that others may read
    say(f"Key     {f'{secret}   (in {SERVE_KEY})' if sys.stdout.isatty() else f'in {SERVE_KEY}'}")
    await server.serve(sockets=[listener])


def _listening(address: Address) -> socket.socket:
    # asyncio sets TCP_NODELAY only if the protocol is given; otherwise a reply takes 40 ms more
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.listen, address.port))
    except OSError:
        listener.close()
        raise EnvironmentFault(
            f"port {address.port} is in use. Choose another with --port, or stop what holds it."
        ) from None
    return listener
