"""Everything of a front in one process, until SIGTERM or Ctrl-C: engine, application, server."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from config.errors import EnvironmentFault
from config.workspace.login import LOCAL_NAMES, key
from serving.engines import Engine, EngineGone
from serving.front import Front
from serving.swap import Swap

SERVE_KEY = Path(".rlhf") / "serve.key"
SLOTS = 4
"""Replies that are generated side by side."""
QUEUE = 64
"""Requests that may wait for a slot."""
DRAIN_SECONDS = 60


def serve(
    root: Path, port: int, wanted: Callable[[], Path], kind: str, say: Callable[[str], None]
) -> None:
    """Serve the export that `wanted` names at 127.0.0.1:`port`, its GGUF file of the type `kind`.

    Raises EnvironmentFault if the port is in use or the engine does not start.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    (root / SERVE_KEY).parent.mkdir(exist_ok=True)
    secret = key(root / SERVE_KEY)
    with _listening(port) as listener:
        asyncio.run(_serve(listener, port, wanted, kind, secret, say))


async def _serve(
    listener: socket.socket,
    port: int,
    wanted: Callable[[], Path],
    kind: str,
    secret: str,
    say: Callable[[str], None],
) -> None:
    threads = os.cpu_count() or 1
    swap = Swap(wanted, lambda folder: Engine(folder, kind, SLOTS, threads))
    try:
        await swap.begin()
    except EngineGone as error:
        raise EnvironmentFault(str(error)) from None
    hosts = frozenset(f"{name}:{port}" for name in LOCAL_NAMES)
    front = Front(swap, secret, hosts, SLOTS + QUEUE)
    config = uvicorn.Config(
        front.app(), log_level=logging.WARNING, access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )  # fmt: skip
    say(f"Serving {swap.engine.name if swap.engine else ''} at http://127.0.0.1:{port}/v1")
    say(f"Key     {secret}   (in {SERVE_KEY})")
    await uvicorn.Server(config).serve(sockets=[listener])


def _listening(port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a reply takes 40 ms more
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise EnvironmentFault(
            f"port {port} is in use. Choose another with --port, or stop what holds it."
        ) from None
    return listener
