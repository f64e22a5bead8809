"""Progress artifacts of a run in the Prefect UI.

A thread writes them: a slow or absent server never holds up the watcher that stops a stage at its budget.
"""

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NamedTuple

from prefect.artifacts import create_progress_artifact, update_progress_artifact

logger = logging.getLogger(__name__)


class Shown(NamedTuple):
    fraction: float
    description: str


class ProgressArtifacts:
    """The newest progress of each key, shown one after the other; what came in between is left out."""

    PAUSE_SECONDS = 2.0
    """Interval between two updates of the same artifact."""

    def __init__(self) -> None:
        self._wanted: dict[str, Shown] = {}
        self._artifacts: dict[str, Any] = {}
        self._changed, self._lock, self._closing = (threading.Event(), threading.Lock(), threading.Event())
        # artifacts belong to the flow run of the context
        run: Callable[[Callable[[], None]], None] = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._work,), name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, key: str, fraction: float, description: str) -> None:
        """Returns at once. A key may have lower-case letters, digits and dashes."""
        with self._lock:
            self._wanted[key] = Shown(fraction, description)
        self._changed.set()

    def close(self, patience_seconds: float) -> None:
        """Show the remaining progress; give up if the server does not answer in time."""
        self._closing.set()
        self._changed.set()
        self._thread.join(patience_seconds)

    def _work(self) -> None:
        while True:
            self._changed.wait()
            closing = self._closing.is_set()
            with self._lock:
                wanted, self._wanted = self._wanted, {}
                self._changed.clear()
            for key, shown in wanted.items():
                self._write(key, shown)
            if closing:
                return
            self._closing.wait(self.PAUSE_SECONDS)

    def _write(self, key: str, shown: Shown) -> None:
        try:
            if key in self._artifacts:
                update_progress_artifact(self._artifacts[key], 100 * shown.fraction, description=shown.description)
            else:
                self._artifacts[key] = create_progress_artifact(
                    100 * shown.fraction, key=key, description=shown.description
                )
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with the server, the run goes on
            logger.debug("progress of %s could not be shown: %s", key, error)
