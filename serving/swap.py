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


class Swap:
    """Keeps one engine at work. `wanted` names the export to serve, and is asked again and again:
    when it names another, that one is started, takes over once it answers, and the old one ends
    when its last request is answered.
    """

    def __init__(self, wanted: Callable[[], Path], start: Callable[[Path], Engine]) -> None:
        self._wanted, self._start = wanted, start
        self.engine: Engine | None = None
        """The one that answers; None while there is none."""
        self._drains: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Start the first engine. Raises RlhfError or EngineGone if that fails."""
        await self._switch(self._wanted())

    async def keep(self) -> None:
        """Look after the engine until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                folder = await asyncio.to_thread(self._wanted)
                old = self.engine
                if old is None or not old.is_alive:
                    self.engine = None
                    logger.warning("the engine ended; starting it again")
                    if old is not None:
                        await old.stop()
                    await self._switch(folder)
                elif folder != old.folder:
                    await self._switch(folder)
                    drain = asyncio.create_task(old.drain())
                    self._drains.add(drain)
                    drain.add_done_callback(self._drains.discard)
            except (RlhfError, EngineGone, OSError) as error:
                logger.warning("%s", error)

    async def _switch(self, folder: Path) -> None:
        engine = self._start(folder)
        await engine.wait()
        self.engine = engine
        logger.info("serving %s", engine.name)

    async def end(self) -> None:
        """Let the requests at work be answered, then end all engines."""
        await asyncio.gather(*self._drains)
        if self.engine is not None:
            await self.engine.drain()
