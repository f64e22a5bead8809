"""All runs of a workspace on one HTML page: cost against gain, a dot per run, and a list with links to their pages."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

from markupsafe import Markup

from config.atomic_file import write_atomically
from config.methods.registry import METHODS
from config.records import kept_folder
from reporting.build import REPORT
from reporting.charts import Dot, Reference, Series, dots_chart, legend
from reporting.numbers import ABSENT, decimal, duration, percent, usd
from reporting.parts import card, document, masthead, paragraph, remark, section, table
from reporting.parts import link as link_to
from reporting.past_runs import PastRun, past_runs
from reporting.templating import Child

TONES = dict(zip(METHODS, cycle(("accent", "second", "base", "sft"))))
PAGE = REPORT.with_name("all.html")
HEAD = ("run", "method", "cost", "time", "wins over SFT", "gold", "KL", "changed")


def gallery_page(root: Path, runs: Sequence[PastRun], page: Path) -> str:
    """The page; `page` is the path it will be written to, which links are relative to."""
    links = {run.run_id: _link(root, run, page) for run in runs}
    content = [_picture(runs, links), _list(runs, links)]
    head = masthead("All runs", sentence=_sentence(runs))
    return document("All runs", head, content, ["rlhf runs --json"])


def write_gallery(root: Path) -> Path:
    """Write report/all.html below `root` and return its path."""
    page = root / PAGE
    page.parent.mkdir(exist_ok=True)
    write_atomically(page, gallery_page(root, past_runs(root), page))
    return page


def _sentence(runs: Sequence[PastRun]) -> str:
    done = [run for run in runs if run.state == "completed"]
    spent = usd(sum(run.usd or 0 for run in runs))
    return f"{len(done)} of {len(runs)} runs completed, {spent} spent."


def _link(root: Path, run: PastRun, page: Path) -> str | None:
    """Link from this page to the run's own page, if that still exists."""
    report = kept_folder(root, run.run_id) / REPORT
    return Path(os.path.relpath(report, page.parent)).as_posix() if report.exists() else None


def _picture(runs: Sequence[PastRun], links: dict[str, str | None]) -> Markup:
    dots = [
        _dot(run, run.made_usd, run.win_rate, links[run.run_id])
        for run in runs
        if run.win_rate is not None and run.made_usd
    ]
    lead = "What the outputs of a run cost to make, reused stages included, against its win rate."
    if not dots:
        return section("cost", "Cost against quality", lead, paragraph("No run was evaluated."))
    label, even = "Cost against win rate, one dot per run", [Reference("no difference", 0.5)]
    chart = dots_chart(dots, label, "US dollars", "wins over SFT", even, shares=True)
    used = {run.method for run in runs}
    key = legend([Series(name, [], tone) for name, tone in TONES.items() if name in used])
    note = "Whiskers: confidence intervals. Each dot links to its run."
    return section("cost", "Cost against quality", lead, card("", chart, key, note=note))


def _dot(run: PastRun, cost: float, rate: float, link: str | None) -> Dot:
    low = rate if run.win_rate_low is None else run.win_rate_low
    high = rate if run.win_rate_high is None else run.win_rate_high
    span = f"{percent(rate)} ({percent(low)} to {percent(high)})"
    title = f"{run.run_id} ({run.method}), {usd(cost)}: {span}"
    return Dot(title, cost, rate, low, high, TONES.get(run.method or "", "quiet"), link)


def _list(runs: Sequence[PastRun], links: dict[str, str | None]) -> Markup:
    rows = [_row(run, links[run.run_id]) for run in runs]
    return section("runs", "Runs", "Newest first.", table(HEAD, rows, numbers=range(2, 7)))


def _row(run: PastRun, link: str | None) -> list[Child]:
    name = link_to(run.run_id, link)
    if run.usd is None:  # its params are missing
        return [name, *[ABSENT] * (len(HEAD) - 2), run.note]
    started = datetime.fromtimestamp(run.started, UTC) if run.started else None
    when = f"{started:%Y-%m-%d %H:%M} UTC, " if started else ""
    return [
        [name, remark(f"{when}{run.state}")],
        run.method,
        usd(run.made_usd),
        duration(run.seconds),
        _wins(run),
        decimal(run.gold_aligned),
        decimal(run.kl),
        "; ".join(filter(None, (run.note, run.changed))),
    ]


def _wins(run: PastRun) -> str:
    if run.win_rate is None:
        return ABSENT
    return f"{percent(run.win_rate)} ({percent(run.win_rate_low)} to {percent(run.win_rate_high)})"
