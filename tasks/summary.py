"""The result of a run in a table: stage, time, cost and key figure, for the command line and the Prefect UI."""

import json
from pathlib import Path
from typing import NamedTuple

from costs.ledger import Ledger, ledger
from reporting.key_figures import key_figure
from tasks.progress import clock
from tasks.run import Run


class Line(NamedTuple):
    stage: str
    time: str
    cost: str
    figure: str


def lines(root: Path, book: Ledger) -> list[Line]:
    """One line per stage that the run came to, and a last one with the totals."""
    table = [
        Line(
            stage=cost.stage,
            time=_time(cost.cached, cost.state, cost.seconds),
            cost=f"{cost.usd:.4f} USD",
            figure=key_figure(cost.stage, _metrics(root, cost.stage)) if cost.state in ("cached", "done") else cost.state,
        )
        for cost in book.stages
    ]
    return [*table, Line("total", clock(book.total_seconds), f"{book.total_usd:.4f} USD", _savings(book))]


def _time(cached: bool, state: str, seconds: float) -> str:
    return "unchanged" if cached else clock(seconds)


def _savings(book: Ledger) -> str:
    parts = []
    if book.saved_usd:
        parts.append(f"saved {book.saved_usd:.4f} USD by what was unchanged")
    if book.waste_usd:
        parts.append(f"{book.waste_usd:.4f} USD of work done twice")
    return ", ".join(parts)


def _metrics(root: Path, stage: str) -> dict[str, float]:
    path = root / "metrics" / f"{stage}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def markdown(run: Run, report: Path) -> str:
    """The table, and where the report is."""
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines(run.root, ledger(run.root, run.params, run.run_id)))
    path = report.resolve()
    return f"# {run.run_id}\n\n| stage | time | cost | key figure |\n|---|---:|---:|---|\n{rows}\n\n[Report]({path.as_uri()}): `{path}`\n"
