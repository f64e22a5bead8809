"""What a stage process cost beyond the rows it wrote itself, as its parent saw it live.

runs/<stage>/process.json    the running process; its modification time is the last sign of life, by
                             the clock of config/alive.py. Gone when the process has ended.
"""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from config import jsonl
from config.alive import now
from config.atomic_file import write_atomically
from config.records import STAGES, AttemptRow, UsageRow
from costs.ledger.attempts import Attempt, read_attempts

logger = logging.getLogger(__name__)


class Lifetime:
    """Measures one stage process, from just before its start."""

    def __init__(self, root: Path, stage: str, run_id: str) -> None:
        self.root, self.stage, self.run_id = root, stage, run_id
        self.path = _process_path(root, stage)
        _charge_left(root, stage)  # of an earlier process, if its end could not be charged
        self.before = max((a.number for a in read_attempts(self.path.parent)[0]), default=0)
        """The last attempt before this process."""
        self.began = now()

    def look(self, pid: int) -> None:
        """Keep that the process lives; a full disk must not end a stage."""
        with suppress(OSError):
            if not self.path.exists():
                record = {"run_id": self.run_id, "pid": pid, "began": self.began, "before": self.before}
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, json.dumps(record))
            os.utime(self.path, (now(), now()))

    def end(self, pid: int, lived_seconds: float) -> None:
        """Charge the time that its rows lack. On a full disk the next run does it."""
        try:
            charge(self.root, self.stage, self.run_id, pid, self.before, lived_seconds, time.time())
        except OSError as error:
            logger.warning("the next run records what %s has cost: %s", self.stage, error)
            return
        self.path.unlink(missing_ok=True)


def charge(root: Path, stage: str, run_id: str, pid: int, before: int, lived_seconds: float, died: float) -> None:
    """Append what a process lived beyond its rows: a `lost` row if it was killed, maybe before its first one;
    otherwise the time that it took to end, as `other`.

    before   the last attempt before the process; it may have made several
    died     seconds since the epoch
    """
    folder = root / "runs" / stage
    attempts = [attempt for attempt in read_attempts(folder)[0] if attempt.number > before]
    newest = attempts[-1] if attempts else None
    unaccounted = lived_seconds - sum(row.seconds for attempt in attempts[:-1] for row in attempt.usage)
    if newest is None or newest.exit_code is None:
        lost = _lost(newest, run_id, pid, before, max(0.0, unaccounted), died)
        jsonl.append(folder / "attempts.jsonl", lost)
        return
    unaccounted -= sum(row.seconds for row in newest.usage)
    if unaccounted > 0:
        row = UsageRow(
            time=died, run_id=newest.run_id, attempt=newest.number, step=_step(newest),
            phase="other", seconds=unaccounted, tokens=0, sequences=0, peak_bytes=0,
            device=newest.device, world_size=newest.world_size,
        )  # fmt: skip
        jsonl.append(folder / "usage.jsonl", row)


def _lost(newest: Attempt | None, run_id: str, pid: int, before: int, lived_seconds: float, died: float) -> AttemptRow:
    return AttemptRow(
        time=died,
        run_id=newest.run_id if newest else run_id,
        attempt=newest.number if newest else before + 1,
        event="lost",
        fingerprint=newest.fingerprint if newest else "",
        pid=pid,
        step=_step(newest) if newest else 0,
        lived_seconds=lived_seconds,
        device=newest.device if newest else "",
        world_size=newest.world_size if newest else 1,
    )


def _step(attempt: Attempt) -> int:
    return max([attempt.resumed_step, *(row.step for row in attempt.usage)])


def charge_killed(root: Path) -> None:
    """Charge processes that were killed together with their run. Call while holding the workspace: no stage is running
    then.
    """
    for stage in STAGES:
        _charge_left(root, stage)


def _charge_left(root: Path, stage: str) -> None:
    path = _process_path(root, stage)
    try:
        record, status = json.loads(path.read_bytes()), path.stat()
        lived = status.st_mtime - record["began"]
        before, pid, run_id = int(record["before"]), int(record["pid"]), str(record["run_id"])
    except (OSError, ValueError, TypeError, KeyError):
        return
    charge(root, stage, run_id, pid, before, lived, status.st_ctime)
    path.unlink()


def _process_path(root: Path, stage: str) -> Path:
    return root / "runs" / stage / "process.json"
