"""The cost of a calendar month: of its retrain cycles, or of all runs.

A month is one of UTC, read from seconds since the epoch: neither summer time nor a change of time zone moves a run
into another month. A run counts in the month in which it began. Rows from the future (the clock was put back since)
count too: money that was spent is spent.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.errors import RlhfError
from config.schema import Params
from config.workspace.kept import kept_params
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from config.workspace.rows import pipeline_rows
from costs.ledger.ledger import read_ledger

PURPOSE = "retrain"
"""Tag of a cycle's pipeline run, and the key of its first row that says so."""


class Month(NamedTuple):
    """Money of the calendar month (UTC)."""

    name: str
    """Such as 2026-11."""
    spent_usd: float
    limit_usd: float | None
    reserved_usd: float = 0.0
    """Planned for the contest of the current cycle."""

    @property
    def left_usd(self) -> float | None:
        return None if self.limit_usd is None else self.limit_usd - self.spent_usd - self.reserved_usd


def month_of(time: float) -> str:
    """The calendar month of a time in seconds since the epoch, such as 2026-11, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m")


def month(root: Path, params: Params, now: float, every_run: bool = False) -> Month:
    """Cost so far and limit of this month's cycles, or of all its runs, each at the prices of its params."""
    name = month_of(now)
    rows = pipeline_rows(root)
    runs = {
        row.run_id
        for row in rows
        if row.event == "start" and (every_run or row.detail.get(PURPOSE)) and month_of(row.time) >= name
    }
    helpers: list[RetrainRow] = jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows
    spent = sum(run_usd(root, params, run_id) for run_id in runs)
    spent += sum(row.usd for row in helpers if row.event == "cost" and month_of(row.time) >= name)
    limit = params.budget.monthly_usd if every_run else params.retrain.monthly_usd
    return Month(name, spent, limit, _reserved(helpers))


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
    """What a pipeline run cost, at the prices of the params it kept; at those of `params` where it kept none that can
    be read.
    """
    try:
        kept = kept_params(root, run_id)
    except RlhfError:
        kept = params
    return read_ledger(root, kept, run_id).total_usd
