"""The purse of a project: what its runs, studies, retrain cycles and judges have been paid, in all its workspaces,
while they run too. Limits on a month are limits on this sum.

A month is one of UTC, read from seconds since the epoch: neither summer time nor a change of time zone moves a run
into another month. A run counts in the month in which it began. Rows from the future (the clock was put back since)
count too: money that was spent is spent.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.errors import RlhfError
from config.records import STAGES, PipelineRow
from config.schema import Params
from config.workspace.kept import kept_params
from config.workspace.project import project_of, workspaces_of
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from config.workspace.rows import pipeline_rows
from costs.ledger.attempts import read_attempts
from costs.ledger.budget import spent
from costs.ledger.ledger import outside_stages, read_ledger
from costs.tables.price import stage_price
from reporting.numbers import usd

PURPOSE = "retrain"
"""Tag of a cycle's pipeline run, and the key of its first row that says so."""
RUN, STUDY, RETRAINING, JUDGE = "run", "study", "retraining", "judge"
PLURALS = {RUN: "runs", STUDY: "studies", RETRAINING: "retraining", JUDGE: "judges"}


class Expense(NamedTuple):
    """What one run, or one process of a retrain cycle, has cost."""

    kind: str
    name: str
    """Id of the run or the cycle."""
    workspace: Path
    time: float
    """When it began, in seconds since the epoch."""
    usd: float
    is_cycle: bool
    """Whether a retrain cycle pays it: a judge of a cycle is both."""


class Month(NamedTuple):
    """Money of the calendar month (UTC)."""

    name: str
    """Such as 2026-11."""
    spent_usd: float
    limit_usd: float | None
    reserved_usd: float = 0.0
    """Planned for the contest of the current cycle."""
    expenses: Sequence[Expense] = ()
    """What it was spent on."""

    @property
    def left_usd(self) -> float | None:
        return None if self.limit_usd is None else self.limit_usd - self.spent_usd - self.reserved_usd

    def words(self) -> str:
        """`$1.20 are spent in 2026-11: runs $0.90, judges $0.30 (rlhf report --month)`."""
        sums = {kind: sum(expense.usd for expense in self.expenses if expense.kind == kind) for kind in PLURALS}
        parts = ", ".join(f"{PLURALS[kind]} {usd(amount)}" for kind, amount in sums.items() if amount)
        return f"{usd(self.spent_usd)} are spent in {self.name}: {parts or 'nothing'} (rlhf report --month)"


def month_of(seconds: float) -> str:
    """The calendar month of a time in seconds since the epoch, such as 2026-11, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m")


def month(root: Path, params: Params, now: float, every_run: bool = False) -> Month:
    """What the project has spent this month and its limit: of the retrain cycles, or `every_run` and study too."""
    name = month_of(now)
    expenses = [expense for workspace in workspaces_of(root) for expense in expenses_of(workspace, params, name)]
    helpers: list[RetrainRow] = jsonl.read(project_of(root) / RETRAIN_ROWS, RetrainRow).rows
    counted = [expense for expense in expenses if every_run or expense.is_cycle]
    limit = params.budget.monthly_usd if every_run else params.retrain.monthly_usd
    return Month(name, sum(expense.usd for expense in counted), limit, _reserved(helpers), counted)


def refusal(root: Path, params: Params) -> str | None:
    """Why nothing may be started: the month's money is spent; None if it is not."""
    spending = month(root, params, time.time(), every_run=True) if params.budget.monthly_usd is not None else None
    if spending is None or spending.left_usd is None or spending.left_usd > 0:
        return None
    return (
        f"budget.monthly_usd={spending.limit_usd:g} is reached: {spending.words()}. Raise it in params.yaml, or wait "
        "for the next month."
    )


def expenses_of(root: Path, params: Params, since: str) -> list[Expense]:
    """What the runs of one workspace that began in the month `since` or later have cost, each at the prices of the
    params it kept; at those of `params` where it kept none that can be read.
    """
    rows = pipeline_rows(root)
    runs = [row for row in rows if row.event == "start" and month_of(row.time) >= since]
    attempts = {stage: read_attempts(root / "runs" / stage)[0] for stage in STAGES} if runs else {}
    expenses = []
    for row in runs:
        kept = _params_of(root, row.run_id, params)
        costs = [
            spent(stage_attempts, [row.run_id], stage_price(kept, stage)) for stage, stage_attempts in attempts.items()
        ]
        total = sum(cost.usd for cost in costs)
        if kept.prices.outside_stages:
            outside = outside_stages(
                [other for other in rows if other.run_id == row.run_id], sum(cost.seconds for cost in costs)
            )
            total += stage_price(kept).usd(outside)
        judges = sum(
            usage.usd
            for stage_attempts in attempts.values()
            for attempt in stage_attempts
            if attempt.run_id == row.run_id
            for usage in attempt.usage
        )
        kind = STUDY if project_of(root) != root.resolve() else RETRAINING if row.detail.get(PURPOSE) else RUN
        expenses += [_expense(kind, row, root, total - judges), _expense(JUDGE, row, root, judges)]
    helpers: list[RetrainRow] = jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows
    expenses += [
        Expense(JUDGE if row.detail.get("process") == JUDGE else RETRAINING, row.cycle, root, row.time, row.usd, True)
        for row in helpers
        if row.event == "cost" and month_of(row.time) >= since
    ]
    return [expense for expense in expenses if expense.usd]


def _expense(kind: str, row: PipelineRow, root: Path, amount: float) -> Expense:
    return Expense(kind, row.run_id, root, row.time, amount, bool(row.detail.get(PURPOSE)))


def _reserved(rows: list[RetrainRow]) -> float:
    """US dollars that the newest cycle reserved and has not spent yet."""
    newest = [row for row in rows if row.cycle == rows[-1].cycle]
    if any(row.event == "end" for row in newest):
        return 0.0
    reserved = next((i for i, row in enumerate(newest) if row.event == "reserved"), None)
    if reserved is None or any(row.event == "cost" for row in newest[reserved:]):
        return 0.0
    return newest[reserved].usd


def run_usd(root: Path, params: Params, run_id: str) -> float:
    """What a pipeline run cost, at the prices of the params it kept, else at those of `params`."""
    return read_ledger(root, _params_of(root, run_id, params), run_id).total_usd


def _params_of(root: Path, run_id: str, params: Params) -> Params:
    try:
        return kept_params(root, run_id)
    except RlhfError:
        return params
