"""`rlhf feedback`: what users said of served replies, and forgetting it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.project import project_root
from config.errors import EnvironmentFault, ParamsError

if TYPE_CHECKING:
    from config.workspace.feedback import FeedbackStore

app = typer.Typer(invoke_without_command=True)
SHOWN_REASONS = 3


@app.callback()
def feedback(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """What users said of the replies of rlhf serve --keep-replies: for each model the share of thumbs up, with an
    interval that may be looked at every day.
    """
    from labelling.anytime import share_at_any_time
    from reporting.numbers import percent

    if context.invoked_subcommand is not None:
        return
    with closing(opened(project_root())) as store:
        versions = store.summary()
    shares = [share_at_any_time(version.up, version.rated) for version in versions]
    if as_json:
        rows = [v._asdict() | {"share": share._asdict()} for v, share in zip(versions, shares, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    from cli.terminal import Terminal

    table = Table("model", "replies", "rated", "up", "at any time, 95%")
    for version, share in zip(versions, shares, strict=True):
        rated = [percent(share.value), f"{percent(share.low)} to {percent(share.high)}"] if version.rated else ["", ""]
        table.add_row(Text(version.run_id), f"{version.replies:,}", f"{version.rated:,}", *rated)
    console = Terminal()
    console.print(table)
    for version in versions:
        for reason in version.reasons[:SHOWN_REASONS]:
            console.print(Text(f"down, {version.run_id}: {' '.join(reason.split())}"), soft_wrap=True)


@app.command()
def forget(
    user: Annotated[str | None, typer.Option(help="All replies to a user, and all that they said.")] = None,
    reply: Annotated[str | None, typer.Option("--id", help="One reply, and all that was said of it.")] = None,
) -> None:
    """Remove what was kept, from the store and from what later runs read, and name the runs that have seen it."""
    if (user or None) is None and (reply or None) is None:
        raise ParamsError("name whose or which reply to forget: --user USER or --id ID.")
    root = project_root()
    with closing(opened(root)) as store:
        number, first = store.forget(user or None, reply or None)
    typer.echo(f"{number} replies and words are removed from .rlhf/feedback.db and data/labels/feedback.jsonl.")
    for run_id in runs_since(root, first) if first is not None else ():
        typer.echo(f"{run_id} may have learnt from them: its data was read after the first was said.")


def runs_since(root: Path, first: float) -> Iterator[str]:
    """Runs that learnt from feedback and started after a word was said."""
    from config.workspace.kept import kept_params
    from config.workspace.rows import pipeline_rows

    for row in pipeline_rows(root):
        if row.event == "start" and row.time >= first:
            try:
                learns = kept_params(root, row.run_id).data.feedback_source is not None
            except ParamsError:  # its folder is gone
                learns = True
            if learns:
                yield row.run_id


def opened(root: Path) -> "FeedbackStore":
    """The store. Raises EnvironmentFault if there is none."""
    from config.workspace.feedback import FEEDBACK, FeedbackStore

    if not (root / FEEDBACK).exists():
        raise EnvironmentFault("no reply was kept yet: start rlhf serve with --keep-replies DAYS.")
    return FeedbackStore(root)
