"""How long a stage's process has lived, by what its parent sees: paid for also where it was killed
before its first row, or everything at once.

runs/<stage>/process.json    the running process, rewritten every second; gone when it has ended
"""

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from config import jsonl
from config.alive import created, is_alive, now
from config.atomic_file import write_atomically
from config.records import STAGES, AttemptRow, UsageRow
from tasks.run.run import Run
from tasks.stage.outcome import last_attempt
from tasks.stage.progress import attempts

logger = logging.getLogger(__name__)

KEPT_EVERY_SECONDS = 1.0


class Life(NamedTuple):
    run_id: str
    pid: int
    created: float
    """As config/alive.py counts."""
    begun: float
    """When its newest attempt was: as it was created, or later where stage processes were started
    anew below it.
    """
    seconds: float
    """Lived since it has begun, when it was last seen alive."""
    before: int
    """The last attempt before it: rows of later ones are its own, whether the process that writes
    them is this one or the one that this one, a shell or a launcher, has started.
    """


class Lifetime:
    """Of the process that `dvc repro` of a stage starts."""

    def __init__(self, run: Run, stage: str) -> None:
        self._run_id, self._root, self._stage = run.run_id, run.root, stage
        self._path = process_path(run.root, stage)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._before = last_attempt(attempts(run.root, stage))
        self._attempt: int | None = None
        self._kept_at = 0.0
        self._looked_at = now()
        self.life: Life | None = None

    def look(self, dvc: int, attempt: AttemptRow | None) -> None:
        """Ask several times a second; `attempt` is the newest row of the process, if it has
        written one.
        """
        if attempt is not None and attempt.attempt != self._attempt:
            if self.life is None or self.life.pid != attempt.pid:
                self._found(attempt.pid)
            elif self._attempt is not None:  # several processes were started anew below this one
                self.life = self.life._replace(begun=now(), seconds=0.0)
            self._attempt = attempt.attempt
        elif self.life is None:
            self._found(_child(dvc))
        if self.life is not None and is_alive(self.life.pid, self.life.created):
            self.life = self.life._replace(seconds=now() - self.life.begun)
            self._keep(self.life)
        self._looked_at = now()

    def _found(self, pid: int | None) -> None:
        """What is found now had not ended at the last look, whether or not it has since."""
        if pid is not None:
            with suppress(psutil.NoSuchProcess):
                at = created(pid)
                lived = max(0.0, self._looked_at - at)
                self.life = Life(self._run_id, pid, at, at, lived, self._before)

    def _keep(self, life: Life) -> None:
        """A full disk must not end a stage."""
        if now() - self._kept_at >= KEPT_EVERY_SECONDS:
            self._kept_at = now()
            with suppress(OSError):
                write_atomically(self._path, json.dumps(life))

    def end(self, last: AttemptRow | None) -> None:
        """Record how long the process lived; or how much longer than its newest row `last`, where
        it recorded its life itself. Where the disk is full that is left to the next run.
        """
        if self.life is not None:
            try:
                if last is None or last.event != "end":
                    note_loss(self._root, self._stage, self.life, time.time(), last)
                else:
                    note_exit(self._root, self._stage, self.life, last)
            except OSError as error:
                logger.warning("what %s has cost is noted by the next run: %s", self._stage, error)
                return
        self._path.unlink(missing_ok=True)


def process_path(root: Path, stage: str) -> Path:
    return root / "runs" / stage / "process.json"


def _child(pid: int) -> int | None:
    """The process that DVC has started: the stage, or the shell that starts it."""
    try:
        return next((child.pid for child in psutil.Process(pid).children()), None)
    except psutil.NoSuchProcess:
        return None


def note_loss(
    root: Path, stage: str, life: Life, died: float, last: AttemptRow | None = None
) -> None:
    """Append how long a killed process lived; `died` in seconds since the epoch. `last`: its newest
    row, None if it was killed before its first.
    """
    number = last.attempt if last else 1 + last_attempt(attempts(root, stage))
    row = AttemptRow(
        time=died,
        run_id=life.run_id,
        attempt=number,
        event="lost",
        fingerprint=last.fingerprint if last else "",
        pid=last.pid if last else life.pid,
        step=last.step if last else 0,
        lived_seconds=life.seconds,
        device=last.device if last else "",
        world_size=last.world_size if last else 1,
    )
    jsonl.append(root / "runs" / stage / "attempts.jsonl", row)


def note_exit(root: Path, stage: str, life: Life, end: AttemptRow) -> None:
    """Append what a process lived beyond its own rows: from its last one, which it writes before
    its interpreter and its device are let go of and its launcher ends.
    """
    path = root / "runs" / stage / "usage.jsonl"
    rows: list[UsageRow] = jsonl.read(path, UsageRow).rows
    counted = [
        row.seconds for row in rows if (row.run_id, row.attempt) == (end.run_id, end.attempt)
    ]
    beyond = life.seconds - sum(counted)
    if not counted or beyond <= 0:
        return
    row = UsageRow(
        time=time.time(),
        run_id=end.run_id,
        attempt=end.attempt,
        step=end.step,
        phase="other",
        seconds=beyond,
        tokens=0,
        sequences=0,
        peak_bytes=0,
        device=end.device,
        world_size=end.world_size,
    )
    jsonl.append(path, row)


def note_killed(root: Path) -> None:
    """Note what processes lived that were killed together with the run that looked after them. Ask
    when no run and no stage is running.
    """
    for stage in STAGES:
        path = process_path(root, stage)
        try:
            life, at = Life(*json.loads(path.read_bytes())), path.stat().st_mtime
        except (OSError, ValueError, TypeError):
            continue
        rows = attempts(root, stage)
        own = [row for row in rows if row.attempt == last_attempt(rows) > life.before]
        if not any(row.event in ("end", "lost") for row in own):
            note_loss(root, stage, life, at, own[-1] if own else None)
        path.unlink()
