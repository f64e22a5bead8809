"""The attempts of a stage, from the rows its processes left: how each ended, how long it took, and which work was
repeated.

Waste is the work of unfinished attempts that had to be done again: the rows of an attempt up to the step that every
later attempt resumed from are useful, the rest (loading included) is waste. Before a later attempt exists nothing was
done again, so nothing is waste. Of useful rows, what a step took before memory ran out in it is waste too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import jsonl
from config.errors import EXIT_DONE, EXIT_OVER_BUDGET, EXIT_RESUMABLE
from config.records import AttemptRow, UsageRow

NO_WORK = ("start", "other")
"""Phases without useful work of the stage."""


@dataclass(frozen=True)
class Attempt:
    """One process of a stage, from its rows in attempts.jsonl and usage.jsonl."""

    number: int
    run_id: str
    fingerprint: str
    """Empty if the process ended before it was written."""
    resumed_step: int
    """Step of the checkpoint it resumed from, 0 without one."""
    exit_code: int | None
    """None without an `end` row: killed, or still running."""
    message: str
    device: str
    world_size: int
    begin: float
    """Seconds since the epoch."""
    last: float
    """Time of the last row."""
    usage: tuple[UsageRow, ...]
    retries: tuple[AttemptRow, ...] = ()
    """Steps repeated with smaller micro-batches after running out of memory."""

    @property
    def done(self) -> bool:
        return self.exit_code == EXIT_DONE

    @property
    def state(self) -> str:
        if self.exit_code is None:
            return "unfinished"
        return {EXIT_DONE: "done", EXIT_RESUMABLE: "stopped", EXIT_OVER_BUDGET: "stopped"}.get(
            self.exit_code, "failed"
        )

    @property
    def worked(self) -> bool:
        """Whether it got beyond its start, resumed, or finished."""
        return (
            self.done or self.resumed_step > 0 or any(row.step >= 1 or row.phase not in NO_WORK for row in self.usage)
        )

    def may_share_checkpoints(self, other: "Attempt") -> bool:
        """Same fingerprint, or one of them was killed before it wrote its own."""
        return not self.fingerprint or not other.fingerprint or self.fingerprint == other.fingerprint


def read_attempts(folder: Path) -> tuple[list[Attempt], int]:
    """The attempts of the stage whose streams are in `folder`, oldest first, and the number of skipped rows."""
    events, usage = (jsonl.read(folder / "attempts.jsonl", AttemptRow), jsonl.read(folder / "usage.jsonl", UsageRow))
    sound = [row for row in usage.rows if math.isfinite(row.seconds) and row.seconds >= 0]
    grouped: dict[tuple[int, str], tuple[list[AttemptRow], list[UsageRow]]] = {}
    for event in events.rows:
        grouped.setdefault((event.attempt, event.run_id), ([], []))[0].append(event)
    for row in sound:
        grouped.setdefault((row.attempt, row.run_id), ([], []))[1].append(row)
    # in file order: a clock may be set back
    attempts = [_attempt(*rows) for rows in grouped.values()]
    return attempts, events.skipped + usage.skipped + len(usage.rows) - len(sound)


def kept_step(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """The last step of `attempt` that no attempt after it had to do again: inf if all its work stands, loading
    included.

    Work up to the step that all later attempts resumed from (until one is done) was kept. Attempts that ended before
    they did any work redid nothing. If the last that could go on from it is not done, and others with other parameters
    or inputs came after, the work was abandoned.
    """
    after = [other for other in later if other.worked]
    if attempt.done or not after:
        return math.inf
    successors = _until_done(other for other in after if attempt.may_share_checkpoints(other))
    if not successors or (not successors[-1].done and successors[-1] is not after[-1]):
        return 0
    return min(other.resumed_step for other in successors)


def split_usage(attempt: Attempt, later: Sequence[Attempt]) -> tuple[list[UsageRow], list[UsageRow]]:
    """The useful rows of `attempt`, and the wasted ones. Their seconds add up to the attempt's: a row in which memory
    did not suffice is divided in two.
    """
    kept = kept_step(attempt, later)
    lost = _lost_seconds(attempt)
    useful: list[UsageRow] = []
    redone: list[UsageRow] = []
    for i, row in enumerate(attempt.usage):
        if not (kept == math.inf or 1 <= row.step <= kept):
            redone.append(row)
        elif seconds := min(lost.get(i, 0.0), row.seconds):
            useful.append(row.model_copy(update={"seconds": row.seconds - seconds}))
            again = {"seconds": seconds, "tokens": 0, "sequences": 0}
            redone.append(row.model_copy(update=again))
        else:
            useful.append(row)
    return useful, redone


def _lost_seconds(attempt: Attempt) -> dict[int, float]:
    """Index of a row -> seconds in it that an out-of-memory error cost.

    Rows of phases do not overlap, so the moment of the retry tells the row; outside of every phase it is `other`. What
    no row tells of yet is in no sum either.
    """
    lost: dict[int, float] = {}
    phases = [(i, row) for i, row in enumerate(attempt.usage) if row.phase != "other"]
    outside = next((i for i, row in enumerate(attempt.usage) if row.phase == "other"), None)
    for retry in attempt.retries:
        index = next((i for i, row in phases if row.time - row.seconds <= retry.time <= row.time), outside)
        if index is not None:
            lost[index] = lost.get(index, 0.0) + retry.lost_seconds
    return lost


def _until_done(attempts: Iterable[Attempt]) -> list[Attempt]:
    rows = []
    for attempt in attempts:
        rows.append(attempt)
        if attempt.done:
            break
    return rows


def _attempt(events: list[AttemptRow], usage: list[UsageRow]) -> Attempt:
    """One attempt from its rows; at least one of the lists is not empty."""
    first: AttemptRow | UsageRow = events[0] if events else usage[0]
    end = next((row for row in events if row.event == "end"), None)
    begin = min([row.time for row in events] + [row.time - row.seconds for row in usage])
    last = max([row.time for row in events] + [row.time for row in usage])
    lived = next((row.lived_seconds for row in events if row.lived_seconds is not None), None)
    lasted = last - begin if lived is None else lived
    missing = lasted - sum(row.seconds for row in usage)
    if end is None and missing > 0:
        usage = [*usage, _unaccounted(first, usage, last, missing)]
    return Attempt(
        number=first.attempt,
        run_id=first.run_id,
        fingerprint=next((row.fingerprint for row in events if row.fingerprint), ""),
        resumed_step=max((row.step for row in events if row.event == "resume"), default=0),
        exit_code=end.exit_code if end else None,
        message=end.message if end else "",
        device=first.device or (usage[0].device if usage else ""),
        world_size=first.world_size,
        begin=begin,
        last=last,
        usage=tuple(usage),
        retries=tuple(row for row in events if row.event == "retry"),
    )


def _unaccounted(row: AttemptRow | UsageRow, usage: list[UsageRow], time: float, seconds: float) -> UsageRow:
    """The missing last row of a killed process: its time outside of every phase."""
    return UsageRow(
        time=time,
        run_id=row.run_id,
        attempt=row.attempt,
        step=max((row.step for row in usage), default=0),
        phase="other",
        seconds=seconds,
        tokens=0,
        sequences=0,
        peak_bytes=0,
        device=row.device,
        world_size=row.world_size,
    )
