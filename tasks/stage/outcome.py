"""How a stage's process ended, read from its attempts.jsonl: `dvc repro` swallows the exit code of
the command it runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from config.errors import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EnvironmentFault,
    RlhfError,
    StageStopped,
    UserError,
)
from config.records import AttemptRow
from tasks.dvc.status import error_line

KILLED = re.compile(r"exited with -\d+")
"""What DVC says of a command that a signal has ended."""
TRACEBACK = "Traceback (most recent call last)"


class StageCrashed(RlhfError):
    """A stage process crashed; it is retried from its checkpoint unless that is hopeless."""

    def __init__(self, message: str, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless
        """It would fail in the same way again: training diverged, or it failed at the same step
        with the same message as the time before.
        """


@dataclass(frozen=True)
class Outcome:
    """A stage with valid outputs."""

    cached: bool
    """No process was started: DVC found the outputs unchanged, or had them in its cache."""
    attempt: int | None
    """The attempt that made the outputs, if that is known."""


def last_attempt(rows: Sequence[AttemptRow]) -> int:
    """The highest attempt number so far, 0 before the first."""
    return max((row.attempt for row in rows), default=0)


def last_done(rows: Sequence[AttemptRow]) -> int | None:
    """The newest attempt that ended well."""
    return max(
        (row.attempt for row in rows if row.event == "end" and row.exit_code == EXIT_DONE),
        default=None,
    )


def judge(
    stage: str, before: int, rows: Sequence[AttemptRow], dvc_exit_code: int, output: str
) -> Outcome:
    """The outcome of `dvc repro` of a stage.

    before         the last attempt that was there before it
    rows           attempts.jsonl after it
    dvc_exit_code  of `dvc repro`, 0 if the outputs are in place and recorded, negative if a signal
                   ended it
    output         what dvc and the stage printed

    Raises UserError (bad input; the stage's own line), StageStopped, StageCrashed, or
    EnvironmentFault if DVC itself failed.
    """
    log = f"runs/{stage}/log.txt"
    newest = [row for row in rows if row.attempt == last_attempt(rows) > before]
    if not newest:
        return _without_attempt(stage, rows, dvc_exit_code, output, log)
    number = newest[0].attempt
    if all(row.event == "lost" for row in newest) and _says_why(stage, output):
        return _without_attempt(stage, rows, dvc_exit_code, output, log)
    end = next((row for row in newest if row.event == "end"), None)
    if end is None:
        raise StageCrashed(
            f"{stage}: the process of attempt {number} was killed without an error message (out of "
            f"memory?). What it printed is in {log}."
        )
    if end.exit_code == EXIT_DONE:
        if dvc_exit_code:
            raise _not_kept(stage, number, dvc_exit_code, output, log)
        return Outcome(cached=False, attempt=number)
    if end.exit_code == EXIT_BAD_INPUT:
        raise UserError(f"{stage}: {end.message}")
    if end.exit_code == EXIT_RESUMABLE:
        raise StageStopped(end.message)
    raise StageCrashed(
        f"{stage}: attempt {number} failed after step {end.step}: {end.message} The full output "
        f"is in {log}.",
        hopeless=end.exit_code == EXIT_DIVERGED or _failed_before(end, rows),
    )


def _failed_before(end: AttemptRow, rows: Sequence[AttemptRow]) -> bool:
    """Whether the attempt before it ended at the same step with the same words."""
    return any(
        row.event == "end"
        and row.attempt == end.attempt - 1
        and (row.exit_code, row.step, row.message) == (end.exit_code, end.step, end.message)
        for row in rows
    )


def _not_kept(
    stage: str, number: int, dvc_exit_code: int, output: str, log: str
) -> StageCrashed | EnvironmentFault:
    """The stage was done, `dvc repro` was not."""
    if dvc_exit_code < 0 or KILLED.search(output):
        killed = "DVC" if dvc_exit_code < 0 else f"the process of attempt {number}"
        return StageCrashed(
            f"{stage}: {killed} was killed after the work was done. What it printed is in {log}."
        )
    reason = error_line(output) or f"dvc repro ended with {dvc_exit_code}."
    return EnvironmentFault(
        f"{stage} is done, but DVC could not keep its outputs: {reason} The full output "
        f"is in {log}."
    )


def _own_line(stage: str, output: str) -> str | None:
    return next((line for line in output.splitlines() if line.startswith(f"{stage}: ")), None)


def _says_why(stage: str, output: str) -> bool:
    """Whether a process that left no row of its own has printed why it ended."""
    return _own_line(stage, output) is not None or TRACEBACK in output


def _without_attempt(
    stage: str, rows: Sequence[AttemptRow], dvc_exit_code: int, output: str, log: str
) -> Outcome:
    """No stage process got as far as its first row."""
    if dvc_exit_code == 0:
        return Outcome(cached=True, attempt=last_done(rows))
    if own := _own_line(stage, output):
        raise UserError(own)
    if TRACEBACK in output:
        last = [
            line for line in output.splitlines() if line and not line.startswith((" ", "ERROR: "))
        ][-1]
        raise StageCrashed(
            f"{stage}: the process failed before it began: {last} The full output is in {log}.",
            hopeless=True,
        )
    raise EnvironmentFault(
        f"DVC could not run {stage}: {error_line(output) or f'exit code {dvc_exit_code}.'} The "
        f"full output is in {log}."
    )
