"""Shipping in the background while a run is at work, so that a slow or absent MLflow never holds
training up.
"""

import logging
import threading
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
        """Why the last pass failed, None if it did not."""
        self.done = False
        """A pass that began after `finish` was asked for has shipped everything."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ship what is left, from now on: no more rows come. Returns at once."""
        self._finish.set()

    def finish(self, patience_seconds: float) -> str | None:
        """Ship what is left, and wait for it; returns in one line why not all of it arrived, None
        if it did.
        """
        self.end()
        self._thread.join(patience_seconds)
        if self.done:
            return None
        return self.fault or (
            f"MLflow at tracking.uri={self._params.tracking.uri} is slow: not all rows were "
            f"shipped within {patience_seconds:.0f} s. "
            "Run rlhf report --sync to ship the rest; nothing is lost."
        )

    def _work(self) -> None:
        from tracking.sync import (
            sync,
        )  # MLflow takes over a second to import: here, beside the data stage

        while True:
            last = self._finish.is_set()
            try:
                sync(self._root, self._params, at_work=None if last else self._run_id)
                self.fault, self.done = None, last
            except EnvironmentFault as error:
                if self.fault is None:
                    logger.warning("%s", error)
                self.fault = str(error)
            if last:
                return
            self._finish.wait(self.RETRY_SECONDS if self.fault else self.EVERY_SECONDS)
