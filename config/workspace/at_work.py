"""Which run is running in a workspace: its rows have no end, and a process holds the workspace's lock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from config.errors import EnvironmentFault
from config.locks import is_held, lock_file
from config.workspace.rows import ENDED, pipeline_rows

RUN_LOCK = Path(".rlhf") / "run.lock"
"""Held while a run is running; the system releases it when the process ends."""
APPROVAL_PATIENCE_SECONDS = 7 * 24 * 3600
"""A run not approved within a week fails; while it waits it holds no lock and has no rows."""


def run_at_work(root: Path) -> str | None:
    """Its run id, None if no run is running in `root`."""
    rows = pipeline_rows(root)
    return rows[-1].run_id if rows and rows[-1].event not in ENDED and is_held(root / RUN_LOCK) else None


@contextmanager
def locked(root: Path, wait: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Hold the workspace; the lock is gone with the process and its stages, however they end.

    `wait` is asked again and again, with the id of the process that holds it, whether to wait for it.
    Raises EnvironmentFault if another run holds it and nobody wants to wait, or if the folder is not writable.
    """
    with lock_file(root / RUN_LOCK, wait) as holder:
        if holder is not None:
            raise EnvironmentFault(
                f"process {holder} is already running the pipeline in {root.resolve()}. "
                "Wait for it or stop it with Ctrl-C; to run side by side, use a second checkout."
            )
        yield
