"""`rlhf runs` and `rlhf restore`: the runs of this folder, and going back to one of them."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from cli.project import project_root, this_command

if TYPE_CHECKING:
    from rich.table import Table

    from reporting.past_runs import PastRun

NEWEST = 20
WIDE = 120


def runs(
    most: Annotated[int, typer.Option("--last", metavar="N", min=1, help="List the newest N.")] = NEWEST,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array for programs.")] = False,
) -> None:
    """The runs of this folder, newest first: state, method, time, cost, win rate, what changed."""
    from reporting.past_runs import past_runs

    past = past_runs(project_root(), most)
    if as_json:
        typer.echo(json.dumps([run._asdict() for run in past], indent=2))
        return
    if not past:
        typer.echo(f"Nothing was run here yet. Start with {this_command()} run.")
        return
    from cli.terminal import Terminal

    console = Terminal()
    console.print(table(past, console.width >= WIDE))


def table(past: "list[PastRun]", wide: bool) -> "Table":
    """One row per run; method, gold and KL if there is room."""
    from rich.table import Table

    from reporting.numbers import decimal, duration, percent, usd

    shown = Table(box=None, header_style="bold")
    shown.add_column("run", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    for name in ("time", "cost", "wins", *(("method", "gold", "KL") if wide else ())):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("changed", overflow="fold", min_width=16)
    for run in past:
        wins = percent(run.win_rate, 0)
        if run.win_rate_low is not None and run.win_rate_high is not None:
            wins += f" [{100 * run.win_rate_low:.0f}, {100 * run.win_rate_high:.0f}]"
        more = (run.method or "", decimal(run.gold_aligned), decimal(run.kl)) if wide else ()
        shown.add_row(
            # date and nickname, which also names the run, on a line each
            run.run_id if wide else re.sub(r"^(\d{8}-\d{6}-)", r"\1\n", run.run_id),
            run.state,
            duration(run.seconds),
            usd(run.usd),
            wins,
            *more,
            "; ".join(filter(None, (run.note, run.changed))),
        )
    return shown


def restore(
    run: Annotated[str, typer.Argument(help="Run by its id, or last, last-1, ...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Restore a completed run: its parameters, models, metrics and samples, from DVC's cache or remote. Nothing is
    trained.
    """
    from config.differences import in_a_line
    from reporting.runs_named import resolve_one
    from tasks.pipeline.restore import restore as bring_back

    root = project_root()
    done = bring_back(root, resolve_one(root, run))
    backup = done.backup.name if done.backup else None
    if as_json:
        changed = [name._asdict() for name in done.changed]
        typer.echo(json.dumps({"run_id": done.run_id, "changed": changed, "backup": backup}))
        return
    typer.echo(f"{done.run_id} is in place: {', '.join(done.stages)}.")
    if done.changed:
        typer.echo(f"params.yaml: {in_a_line(done.changed)}; as it was it is in {backup}.")
