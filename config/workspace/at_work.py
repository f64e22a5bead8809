"""Which run is running in a workspace: its rows have no end, and a process holds the workspace's
lock.
"""

from pathlib import Path

from config import jsonl
from config.locks import is_held
from config.records import PipelineRow

RUN_LOCK = Path(".rlhf") / "run.lock"
"""Held while a run is running; the system releases it when the process ends."""
APPROVAL_PATIENCE_SECONDS = 7 * 24 * 3600
"""A run not approved within a week fails; while it waits it holds no lock and has no rows."""


def run_at_work(root: Path) -> str | None:
    """Its run id, None if no run is running in `root`."""
    rows: list[PipelineRow] = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    return (
        rows[-1].run_id if rows and rows[-1].event != "end" and is_held(root / RUN_LOCK) else None
    )
