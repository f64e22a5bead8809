"""What the exit code of a stage's process means, with the message from its last row."""

from collections.abc import Sequence
from dataclasses import dataclass

from config.errors import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_OVER_BUDGET,
    EXIT_RESUMABLE,
    OverBudget,
    RlhfError,
    StageStopped,
    UserError,
)
from config.records import AttemptRow
from tasks.stage.process import Ended, last_line


class StageCrashed(RlhfError):
    """A stage process crashed; it is retried from its checkpoint unless that is hopeless."""

    def __init__(self, message: str, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless
        """It would fail in the same way again: training diverged, or it failed at the same step with the same message
        as the time before.
        """


@dataclass(frozen=True)
class Outcome:
    """A stage with valid outputs."""

    cached: bool
    """No process was started: DVC found the outputs unchanged, or an earlier run had made them."""
    attempt: int | None
    """The attempt that made the outputs, if it is one of this workspace."""
    made_by: str = ""
    """The run that made the outputs of a cached stage, if that is known."""


def judge(stage: str, before: int, rows: Sequence[AttemptRow], ended: Ended) -> int | None:
    """The attempt that made the outputs; None if the process wrote no rows.

    before  the last attempt before this process
    rows    of attempts.jsonl, those of this process and earlier ones
    ended   how the process ended

    Raises UserError (bad input; the stage's own line), StageStopped, OverBudget or StageCrashed.
    """
    log = f"runs/{stage}/log.txt"
    new_rows = [row for row in rows if row.attempt > before and row.event != "lost"]
    end = new_rows[-1] if new_rows and new_rows[-1].event == "end" else None
    message = end.message if end is not None else _own_line(stage, ended.output)
    if ended.code == EXIT_DONE:
        return new_rows[-1].attempt if new_rows else None
    if ended.code == EXIT_BAD_INPUT and message:
        raise UserError(f"{stage}: {message}")
    if ended.code == EXIT_RESUMABLE:
        raise StageStopped(message or f"{stage} was asked to stop: run again to go on from there.")
    if ended.code == EXIT_OVER_BUDGET:
        raise OverBudget(message or f"{stage} has spent its budget: raise it, and run again to go on.")
    if ended.code < 0:
        if end is not None and end.exit_code == EXIT_DONE:
            raise StageCrashed(
                f"{stage}: the process was killed after the work was done. What it printed is in {log}."
            )
        raise StageCrashed(
            f"{stage}: the process was killed without an error message (out of memory?). What it printed is in {log}."
        )
    if end is None:
        reason = f"{message or last_line(ended.output)} The full output is in {log}."
        if new_rows:
            raise StageCrashed(f"{stage}: attempt {new_rows[-1].attempt} failed: {reason}")
        raise StageCrashed(f"{stage}: the process failed before it began: {reason}", hopeless=True)
    raise StageCrashed(
        f"{stage}: attempt {end.attempt} failed after step {end.step}: {message} The full output is in {log}.",
        hopeless=ended.code == EXIT_DIVERGED or _failed_before(end, rows),
    )


def _failed_before(end: AttemptRow, rows: Sequence[AttemptRow]) -> bool:
    """Whether the attempt before it ended at the same step with the same words."""
    return any(
        row.event == "end"
        and row.attempt == end.attempt - 1
        and (row.exit_code, row.step, row.message) == (end.exit_code, end.step, end.message)
        for row in rows
    )


def _own_line(stage: str, output: str) -> str:
    """The reason printed by a process that left no `end` row."""
    start = f"{stage}: "
    lines = [line for line in output.splitlines() if line.startswith(start)]
    return lines[-1].removeprefix(start) if lines else ""
