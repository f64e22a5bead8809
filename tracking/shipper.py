"""Ships rows in the background during a run, so that a slow or absent MLflow delays no training."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from config.errors import EnvironmentFault
from config.schema import Params

logger = logging.getLogger(__name__)


class Shipper:
    """A thread that calls `tracking.sync.sync` every few seconds."""

    EVERY_SECONDS = 3.0
    RETRY_SECONDS = 15.0

    def __init__(self, root: Path, params: Params, run_id: str) -> None:
        self._root, self._params, self._run_id = root, params, run_id
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self.fault: str | None = None
        """Why the last pass failed; None if it succeeded."""
        self.done = False
        """A pass that began after `finish` was called has shipped everything."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ship the remaining rows: no more will come. Returns at once."""
        self._finish.set()

    def finish(self, give_up: Callable[[], bool]) -> str | None:
        """Ship the remaining rows and wait while a pass makes progress: a large model takes time, and each request has
        a timeout.

        Returns one line with the reason if something did not arrive, else None.
        """
        self.end()
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.2)
        if self.done:
            return None
        return self.fault or (
            f"MLflow at tracking.uri={self._params.tracking.uri} has not taken all rows and models yet, "
            "and the run was asked not to wait. Run rlhf report --sync to ship the rest; nothing is lost."
        )

    def _work(self) -> None:
        from tracking.sync import sync  # MLflow takes over a second to import: here, while the data stage runs

        last = False
        while not last:
            last = self._finish.is_set()
            try:
                sync(self._root, self._params, at_work=None if last else self._run_id)
                self.fault, self.done = None, last
            except EnvironmentFault as error:
                if self.fault is None:
                    logger.warning("%s", error)
                self.fault = str(error)
            if not last:
                self._finish.wait(self.RETRY_SECONDS if self.fault else self.EVERY_SECONDS)
