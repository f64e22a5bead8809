"""The engine in use: the first one, its successor after a promotion, or a new one after a crash."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from config.errors import RlhfError
from serving.engines import Engine, EngineGone

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
AFTER_FAULT_SECONDS = 5.0
"""Seconds before a failed export or engine is tried again."""


class Swap:
    """Keeps one engine running. `wanted` names the export to serve and is polled: when it changes, the new engine is
    started and takes over once it answers; the old one stops after its last request.
    """

    def __init__(
        self, wanted: Callable[[], Path], start: Callable[[Path], Engine], serves: Callable[[str], None]
    ) -> None:
        """`serves` is called with the export that is served from then on."""
        self._wanted, self._start, self._serves = wanted, start, serves
        self.engine: Engine | None = None
        """The current engine; None while there is none."""
        self._drains: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Start the first engine. Raises RlhfError or EngineGone if that fails."""
        await self._switch(await asyncio.to_thread(self._wanted))

    async def keep(self) -> None:
        """Watch the engine until cancelled."""
        look: asyncio.Task[Path] | None = None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if self.engine is None or not self.engine.is_alive:
                    await self._restart()
                # in a thread: a promoted model may have to be exported first
                look = look or asyncio.create_task(asyncio.to_thread(self._wanted))
                if look.done():
                    done, look = look, None
                    await self._follow(done.result())
            except (RlhfError, EngineGone, OSError) as error:
                logger.warning("%s", error)
                await asyncio.sleep(AFTER_FAULT_SECONDS)

    async def _restart(self) -> None:
        old, self.engine = self.engine, None
        if old is not None:
            logger.warning("the engine ended; starting it again")
            await old.stop()
        await self._switch(self._folder)

    async def _follow(self, folder: Path) -> None:
        """Switch to the engine of another export, if `wanted` names another."""
        old = self.engine
        if old is None or folder == old.folder:
            return
        await self._switch(folder)
        drain = asyncio.create_task(old.drain())
        self._drains.add(drain)
        drain.add_done_callback(self._drains.discard)

    async def _switch(self, folder: Path) -> None:
        engine = self._start(folder)
        await engine.wait()
        self.engine, self._folder = engine, folder
        self._serves(engine.name)
        logger.info("serving %s", engine.name)

    async def end(self) -> None:
        """Answer running requests, then stop all engines."""
        await asyncio.gather(*self._drains)
        if self.engine is not None:
            await self.engine.drain()
