"""Which engine answers: the first one, its successor after a promotion, and a new one after a
crash.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from config.errors import RlhfError
from serving.engines import Engine, EngineGone

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
AFTER_FAULT_SECONDS = 5.0
"""Before what failed is tried again: an export, or an engine that does not load."""


class Swap:
    """Keeps one engine at work. `wanted` names the export to serve, and is asked again and again:
    when it names another, that one is started, takes over once it answers, and the old one ends
    when its last request is answered.
    """

    def __init__(
        self,
        wanted: Callable[[], Path],
        start: Callable[[Path], Engine],
        serves: Callable[[str], None],
    ) -> None:
        """`serves` hears the name of the export that is served from then on."""
        self._wanted, self._start, self._serves = wanted, start, serves
        self.engine: Engine | None = None
        """The one that answers; None while there is none."""
        self._drains: set[asyncio.Task[None]] = set()

    async def begin(self, folder: Path) -> None:
        """Start the first engine. Raises RlhfError or EngineGone if that fails."""
        await self._switch(folder)

    async def keep(self) -> None:
        """Look after the engine until cancelled."""
        look: asyncio.Task[Path] | None = None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if self.engine is None or not self.engine.is_alive:
                    await self._restart()
                # in a thread, as a model that was promoted may have to be exported first
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
        """Let the engine of another export take over, if this is another."""
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
        """Let the requests at work be answered, then end all engines."""
        await asyncio.gather(*self._drains)
        if self.engine is not None:
            await self.engine.drain()
