"""Checkpoints of other code: found before a run starts, so that the user can decide whether to resume from them.

RLHF_CHANGED_CODE passes the answer to a stage's process. Without one a run starts over, and its plan includes that.
"""

import os
from pathlib import Path
from typing import NamedTuple

from config.differences import differences, in_a_line, sections_of
from config.dvc_stages import defined
from config.errors import ParamsError
from config.records import CHANGED_CODE_VARIABLE, CONTINUE, RESTART
from config.schema import Params
from config.stage_code import changed_code, some, stage_code
from config.workspace.kept import kept_params
from costs.ledger.attempts import Attempt, read_attempts
from costs.ledger.budget import Cost
from costs.tables.price import stage_price
from reporting.numbers import duration, usd


class ChangedCode(NamedTuple):
    """The newest checkpoint of a stage, where other code made it."""

    stage: str
    step: int
    files: list[str]
    """Files that have changed since."""
    cost: Cost
    """Cost of repeating that work, as measured."""

    def __str__(self) -> str:
        return (
            f"{self.stage}: other code made the checkpoint after step {self.step}: {some(self.files)} changed since. "
            f"Starting over costs {duration(self.cost.seconds)} and {usd(self.cost.usd)} again."
        )


def policy() -> str:
    """CONTINUE or RESTART, by default RESTART. Raises ParamsError for another value of the variable."""
    answer = os.environ.get(CHANGED_CODE_VARIABLE) or RESTART
    if answer not in (CONTINUE, RESTART):
        raise ParamsError(f"{CHANGED_CODE_VARIABLE}={answer} must be {CONTINUE} or {RESTART}.")
    return answer


def is_answered() -> bool:
    return bool(os.environ.get(CHANGED_CODE_VARIABLE))


def newest_checkpoint(root: Path, stage: str, attempts: list[Attempt]) -> tuple[Path, int] | None:
    """The newest complete checkpoint with the fingerprint of the stage's last attempt, and its step."""
    if not attempts:
        return None
    folder = root / "checkpoints" / stage / (attempts[-1].fingerprint or "none")
    folders = [path.parent for path in folder.glob("step-*/manifest.json")]
    newest = max(folders, key=lambda path: path.name, default=None)
    return (newest, int(newest.name.removeprefix("step-"))) if newest else None


def left_aside(root: Path, params: Params, stage: str) -> str | None:
    """What was paid for a checkpoint of `stage` that these params do not go on from, as a line; None if they may."""
    attempts, _ = read_attempts(root / "runs" / stage)
    checkpoint = newest_checkpoint(root, stage, attempts)
    if checkpoint is None:
        return None
    try:
        kept = kept_params(root, attempts[-1].run_id)
    except ParamsError:  # of an earlier schema
        return None
    stages, listed = params.stages[: params.stages.index(stage) + 1], defined(root)
    names = dict.fromkeys(name for before_it in stages for name in listed[before_it]["params"])
    changes = differences(sections_of(kept, [*names]), sections_of(params, [*names]))
    if not changes:
        return None
    cost = _cost(params, stage, attempts, checkpoint[1])
    return (
        f"{stage}: {usd(cost.usd)} and {duration(cost.seconds)} are left aside: its checkpoint after step "
        f"{checkpoint[1]} has {in_a_line(changes, 3)}. Runs with the old values go on from it."
    )


def changed_since_checkpoint(root: Path, params: Params, stage: str) -> ChangedCode | None:
    """None where the stage has no checkpoint, or today's code made it."""
    attempts, _ = read_attempts(root / "runs" / stage)
    checkpoint = newest_checkpoint(root, stage, attempts)
    files = changed_code(checkpoint[0], stage_code(root, stage)) if checkpoint else []
    if checkpoint is None or not files:
        return None
    return ChangedCode(stage, checkpoint[1], files, _cost(params, stage, attempts, checkpoint[1]))


def _cost(params: Params, stage: str, attempts: list[Attempt], step: int) -> Cost:
    """Cost of the steps up to `step` of the last attempt and those before it with the same parameters and inputs."""
    same_attempts = [attempt for attempt in attempts if attempt.fingerprint == attempts[-1].fingerprint]
    rows = {
        (row.step, row.phase): row for attempt in same_attempts for row in attempt.usage if 1 <= row.step <= step
    }.values()
    return Cost(stage_price(params, stage).usd_of_rows(rows), sum(row.seconds for row in rows))
