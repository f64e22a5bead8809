"""A whole front in one process, until SIGTERM or Ctrl-C."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from config.errors import EnvironmentFault
from config.workspace.login import SERVE_KEY, key
from config.workspace.served import RECORD_SECONDS
from serving.account import Account
from serving.engines import ENGINES, Engine, EngineGone
from serving.feedback import Feedback
from serving.front import Front
from serving.settings import QUEUE, Address, Challenger, Settings
from serving.sides import Sides
from serving.swap import Swap

DRAIN_SECONDS = 60
EXPIRE_SECONDS = 3600.0


def serve(
    root: Path,
    address: Address,
    wanted: Callable[[], Path],
    settings: Settings,
    account: Account,
    say: Callable[[str], None],
    keep_days: float | None = None,
    challenger: Challenger | None = None,
    has_page: bool = False,
) -> None:
    """Serve the export that `wanted` names. With `keep_days`, replies are kept for so long, and longer if somebody
    rates them.

    Raises EnvironmentFault if the port is in use or the engine does not start.
    """
    (root / SERVE_KEY).parent.mkdir(exist_ok=True)
    secret = key(root / SERVE_KEY)

    def start(folder: Path) -> Engine:
        return ENGINES[settings.engine](folder, settings)

    with _listening(address) as listener:
        share = 0.0 if challenger is None else challenger.share
        sides = Sides(Swap(wanted, start, partial(account.serves, share=1 - share)))
        if challenger is not None:
            serves = partial(account.serves, side="challenger", share=share)
            sides = Sides(sides.served, Swap(challenger.wanted, start, serves), share, challenger.compares)
        front = Front(sides, secret, address.hosts, settings.slots + QUEUE, account)
        front.has_page = has_page
        if keep_days is not None:
            front.feedback = Feedback(root, keep_days, front.metrics.words)
        try:
            asyncio.run(_serve(listener, address, sides, secret, front, say))
        finally:
            account.record()
            if front.feedback is not None:
                front.feedback.close()


async def _serve(
    listener: socket.socket, address: Address, sides: Sides, secret: str, front: Front, say: Callable[[str], None]
) -> None:
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    stop = asyncio.create_task(asked_to_stop.wait())
    begin = asyncio.create_task(_begin(sides))
    await asyncio.wait({begin, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not begin.done():
        begin.cancel()
        await asyncio.wait({begin})
        return
    try:
        await begin
    except EngineGone as error:
        raise EnvironmentFault(str(error)) from None
    names = " and ".join(engine.name for engine in sides.engines())
    runner = web.AppRunner(front.app(), access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_SECONDS)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    say(f"Serving {names} at http://127.0.0.1:{address.port}/v1")
    # the output of a background process goes to a log that others may read
    if front.has_page:
        say(f"Page    http://127.0.0.1:{address.port}/{f'#key={secret}' if sys.stdout.isatty() else ''}")
    say(f"Key     {f'{secret}   (in {SERVE_KEY})' if sys.stdout.isatty() else f'in {SERVE_KEY}'}")
    keepers = {asyncio.create_task(swap.keep()) for swap in sides.swaps}
    keepers.add(asyncio.create_task(_record(front.account)))
    if front.feedback is not None:
        keepers.add(asyncio.create_task(_expire(front.feedback)))
    await stop
    await runner.cleanup()
    for keeper in keepers:
        keeper.cancel()
    await asyncio.wait(keepers)
    await asyncio.gather(*(swap.end() for swap in sides.swaps))


async def _begin(sides: Sides) -> None:
    await asyncio.gather(*(swap.begin() for swap in sides.swaps))


async def _record(account: Account) -> None:
    while True:
        await asyncio.sleep(RECORD_SECONDS)
        account.record()


async def _expire(feedback: Feedback) -> None:
    while True:
        await feedback.expire()
        await asyncio.sleep(EXPIRE_SECONDS)


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
