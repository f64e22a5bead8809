"""Everything of a front in one process, until SIGTERM or Ctrl-C: engine, application, server."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn

from config.errors import EnvironmentFault
from config.workspace.login import SERVE_KEY, key
from serving.engines import ENGINES, EngineGone
from serving.front import Front
from serving.settings import Address, EngineName, Settings, Weights
from serving.swap import Swap

SLOTS = 4
"""Replies that are generated side by side."""
QUEUE = 64
"""Requests that may wait for a slot."""
DRAIN_SECONDS = 60


def serve(
    root: Path,
    address: Address,
    wanted: Callable[[], Path],
    engine: EngineName,
    weights: Weights,
    say: Callable[[str], None],
) -> None:
    """Serve the export that `wanted` names.

    Raises EnvironmentFault if the port is in use or the engine does not start.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    (root / SERVE_KEY).parent.mkdir(exist_ok=True)
    secret = key(root / SERVE_KEY)
    settings = Settings(weights, SLOTS, os.cpu_count() or 1)
    swap = Swap(wanted, lambda folder: ENGINES[engine](folder, settings))
    with _listening(address) as listener:
        asyncio.run(_serve(listener, address, swap, secret, say))


async def _serve(
    listener: socket.socket, address: Address, swap: Swap, secret: str, say: Callable[[str], None]
) -> None:
    try:
        await swap.begin()
    except EngineGone as error:
        raise EnvironmentFault(str(error)) from None
    front = Front(swap, secret, address.hosts, SLOTS + QUEUE)
    config = uvicorn.Config(
        front.app(), log_level=logging.WARNING, access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )  # fmt: skip
    say(f"Serving {swap.engine.name if swap.engine else ''} at http://127.0.0.1:{address.port}/v1")
    # the output of a background process is in a log, which others may read
    say(f"Key     {f'{secret}   (in {SERVE_KEY})' if sys.stdout.isatty() else f'in {SERVE_KEY}'}")
    await uvicorn.Server(config).serve(sockets=[listener])


def _listening(address: Address) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a reply takes 40 ms more
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
