"""`rlhf report`: what a run cost and what it bought, as a table, as JSON, or as the HTML page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ignored_options import refuse_ignored
from config.records import NO_RUN_ID
from config.workspace.rows import pipeline_rows
from reporting.runs_named import resolve_one

if TYPE_CHECKING:
    from rich.table import Table

    from config.schema import Params
    from costs.ledger.ledger import Ledger
    from costs.ledger.reconcile import Comparison, Reconciled
    from reporting.inputs import Findings

WIDE = 110
"""Terminal columns from which plan and measurement fit in one table."""


def report(
    context: typer.Context,
    run_id: Annotated[str | None, typer.Argument(help="Run to report on; the newest by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger as JSON: totals, stages, phases.")] = False,
    costs: Annotated[bool, typer.Option("--costs", help="Show every phase of every stage.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write report/report.html and print its path.")] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Write report/report.html and open it in the browser.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Print ten lines of Markdown, for a paper, a model card or an issue.")
    ] = False,
    month: Annotated[
        bool, typer.Option("--month", help="Show what the project has spent this month, and on what.")
    ] = False,
    sync: Annotated[bool, typer.Option("--sync", help="Ship the rows that MLflow has not got yet.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Write report/all.html: every run, its cost and its quality.")
    ] = False,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, for example another price.")
    ] = None,
) -> None:
    """What a run cost and what it bought: stages, time, money, key figures."""
    from cli.project import project_root

    root = project_root()
    if run_id is not None and run_id != NO_RUN_ID:
        run_id = resolve_one(root, run_id)
    if every:
        refuse_ignored(context, {"every", "open_page"}, {}, "--all, a page of every run")
        from reporting.gallery_page import write_gallery

        page = write_gallery(root).resolve()
        typer.echo(page)
        if open_page:
            _open(page)
        return
    params = run_params(root, run_id, assignments or [])
    if card:
        from reporting.inputs import read_findings
        from reporting.run_card import run_card

        typer.echo(run_card(root, read_findings(root, params, run_id)), nl=False)
        return
    if month:
        _print_month(root, params, as_json)
        return
    if sync:
        _sync(root, params, quiet=as_json)
    if html or open_page:
        _write_page(root, params, run_id, quiet=as_json, open_page=open_page)
    if as_json:
        typer.echo(json.dumps(run_json(root, params, run_id), indent=2))
    elif costs or not (html or open_page or sync):
        _print(root, params, run_id, costs)


def _print_month(root: Path, params: "Params", as_json: bool) -> None:
    """Every run and retrain cycle of the month, in all workspaces of the project, and the limit."""
    import time
    from datetime import UTC, datetime

    from rich.table import Table

    from cli.terminal import Terminal
    from reporting.numbers import usd
    from tasks.run.purse import month

    spending = month(root, params, time.time(), every_run=True)
    if as_json:
        items = [{**item._asdict(), "workspace": str(item.workspace)} for item in spending.expenses]
        typer.echo(json.dumps({**spending._asdict(), "expenses": items}, indent=2))
        return
    table = Table("began (UTC)", "kind", "run or cycle", box=None, show_footer=True, header_style="bold")
    table.columns[0].footer = spending.name
    table.columns[2].footer = "" if spending.limit_usd is None else f"of {usd(spending.limit_usd)}"
    table.add_column("cost", usd(spending.spent_usd), justify="right")
    for item in sorted(spending.expenses, key=lambda item: item.time):
        began = datetime.fromtimestamp(item.time, UTC).strftime("%d %H:%M")
        table.add_row(began, item.kind, item.name, usd(item.usd))
    Terminal().print(table)


def _write_page(root: Path, params: "Params", run_id: str | None, quiet: bool, open_page: bool) -> None:
    from reporting.build import build_report

    page = build_report(root, params, run_id).resolve()
    if not quiet:
        typer.echo(page)
    if open_page:
        _open(page)


def _open(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.as_uri())


def run_json(root: Path, params: "Params", run_id: str | None = None) -> dict[str, Any]:
    """The ledger of a run with plan, measurement and error side by side, and what a point of win rate cost."""
    from costs.ledger.reconcile import as_dict
    from reporting.inputs import read_findings
    from reporting.verdict import usd_per_win_rate_point

    findings = read_findings(root, params, run_id)
    return {
        **as_dict(findings.ledger, findings.reconciled),
        "usd_per_win_rate_point": usd_per_win_rate_point(findings),
    }


def run_params(root: Path, run_id: str | None, assignments: list[str]) -> "Params":
    """The params kept with the run, so that a later price change does not change its bill; else those of the project.

    `assignments` override them. Raises ParamsError for a broken file or assignment.
    """
    from config.load import load
    from config.records import kept_folder
    from config.workspace.kept import kept_params

    if run_id is None:
        rows = pipeline_rows(root)
        run_id = rows[-1].run_id if rows else None
    if run_id and (kept_folder(root, run_id) / "params.yaml").exists():
        return kept_params(root, run_id, assignments)
    return load(root / "params.yaml", assignments)


def stage_table(findings: "Findings") -> "Table":
    """Stage, result, time, cost and key figure, with totals."""
    from rich.table import Table
    from rich.text import Text

    from reporting.key_figures import key_figure
    from reporting.numbers import duration, usd

    ledger = findings.ledger
    table = Table("stage", "result", box=None, show_footer=True, header_style="bold", footer_style="bold")
    table.columns[0].footer = "total"
    table.add_column("time", duration(ledger.total_seconds), justify="right")
    table.add_column("cost", usd(ledger.total_usd), justify="right")
    table.add_column("key figure")
    for stage in ledger.stages:
        figure = key_figure(stage.stage, findings.metrics.get(stage.stage, {}))
        table.add_row(stage.stage, stage.state, duration(stage.seconds), usd(stage.usd), Text(figure or stage.message))
    if ledger.outside_seconds >= 1:
        cost = usd(ledger.outside_usd) if ledger.outside_usd else "-"
        table.add_row(
            "outside", "", duration(ledger.outside_seconds), cost, "" if ledger.outside_usd else "not counted"
        )
    return table


def phase_table(ledger: "Ledger") -> "Table":
    """Every phase of every stage."""
    from rich.table import Table

    from reporting.numbers import ABSENT, count, duration, memory, usd

    table = Table("stage", "phase", box=None, header_style="bold")
    for name in ("time", "cost", "tokens", "peak memory"):
        table.add_column(name, justify="right")
    for stage in ledger.stages:
        for phase in stage.phases:
            tokens = count(phase.tokens) if phase.tokens else ABSENT
            table.add_row(
                stage.stage, phase.phase, duration(phase.seconds), usd(phase.usd), tokens, memory(phase.peak_bytes)
            )
    return table


def plan_tables(reconciled: "Reconciled", wide: bool) -> list["Table"]:
    """Planned and measured for every phase, stage and the run: one table if it fits, else one of times and one of
    costs and memory.
    """
    groups = [("time", "cost", "memory")] if wide else [("time",), ("cost", "memory")]
    return [_plan_table(reconciled, group) for group in groups]


def _plan_table(reconciled: "Reconciled", quantities: Sequence[str]) -> "Table":
    from rich.table import Table

    titles = {"time": ("planned", "measured"), "cost": ("planned $", "measured $")}
    titles["memory"] = ("plan MiB", "MiB")
    table = Table("stage", "phase", box=None, header_style="bold")
    for quantity in quantities:
        for name in (*titles[quantity], *(("error",) if quantity != "cost" else ())):
            table.add_column(name, justify="right", no_wrap=True)

    def cells(comparison: "Comparison") -> list[str]:
        return [cell for quantity in quantities for cell in _cells(comparison)[quantity]]

    for stage in reconciled.stages:
        for phase, comparison in stage.phases.items():
            table.add_row(stage.stage, phase, *cells(comparison))
        table.add_row(stage.stage, "all", *cells(stage.total), style="bold")
    table.add_row("total", "", *cells(reconciled.total), style="bold")
    return table


def _cells(comparison: "Comparison") -> dict[str, list[str]]:
    from reporting.numbers import ABSENT, deviation, duration, usd

    def mebibytes(value: float | None) -> str:
        return ABSENT if value is None else f"{value / 2**20:,.0f}"

    return {
        "time": [
            duration(comparison.planned_seconds),
            duration(comparison.measured_seconds),
            deviation(comparison.error),
        ],
        "cost": [usd(comparison.planned_usd), usd(comparison.measured_usd)],
        "memory": [
            mebibytes(comparison.planned_peak_bytes),
            mebibytes(comparison.measured_peak_bytes),
            deviation(comparison.error_peak_bytes),
        ],
    }


def cost_notes(root: Path, findings: "Findings") -> list[str]:
    """Waste, savings, cost per point of win rate, whether there was a plan, and unreadable timings."""
    from config.workspace.timed import read_timed, skipped_note
    from reporting.numbers import usd
    from reporting.verdict import usd_per_win_rate_point

    ledger, point = findings.ledger, usd_per_win_rate_point(findings)
    notes = [
        f"Wasted on work done again: {usd(ledger.waste_usd)}. Saved by unchanged stages: {usd(ledger.saved_usd)}."
    ]
    if ledger.taught_nothing_usd:
        notes.append(f"Replies that were all scored alike, and taught nothing: {usd(ledger.taught_nothing_usd)}.")
    retries = sum(stage.memory_retries for stage in ledger.stages)
    if retries:
        notes.append(f"Work done again in smaller pieces because memory ran out: {retries} times.")
    if point is not None:
        notes.append(f"A point of win rate above 50% cost {usd(point)}.")
    if not findings.reconciled.hardware:
        notes.append("This run kept no plan, so there is nothing to compare its measurements with.")
    skipped = skipped_note(read_timed(root).skipped)
    return [*notes, skipped] if skipped else notes


def _print(root: Path, params: "Params", run_id: str | None, costs: bool) -> None:
    from rich.text import Text

    from cli.terminal import Terminal
    from reporting.build import REPORT
    from reporting.inputs import read_findings
    from reporting.verdict import verdict

    findings = read_findings(root, params, run_id)
    console = Terminal()
    judged = verdict(findings)
    console.print(Text(f"run {findings.ledger.run_id}", style="dim"))
    console.print(stage_table(findings))
    if costs:
        console.print()
        console.print(phase_table(findings.ledger))
        console.print()
        if findings.reconciled.hardware:
            for table in plan_tables(findings.reconciled, console.width >= WIDE):
                console.print(table)
                console.print()
        for line in cost_notes(root, findings):
            console.print(Text(line))
    console.print()
    console.print(Text.assemble((f"{judged.title}. ", "bold"), judged.sentence))
    for note in findings.notes:
        console.print(Text(note, style="yellow"))
    if (root / REPORT).exists():
        console.print(Text(f"Report: {(root / REPORT).resolve()}"), soft_wrap=True)


def _sync(root: Path, params: "Params", quiet: bool) -> None:
    """Ship the rows that MLflow does not have yet."""
    from tracking.sync import sync

    rows = sync(root, params)
    if not quiet:
        typer.echo(f"{rows} new rows are in MLflow ({params.tracking.uri}).")
