"""`rlhf study`: runs that differ in a few settings, and one table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.project import project_root, typed_path

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def study(
    file: Annotated[Path, typer.Argument(parser=typed_path, metavar="FILE", help="Such as studies/levers.yaml.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for programs instead of a table.")
    ] = False,
) -> None:
    """Run every variant of a study with every seed, and compare cost and quality with the first variant's. What two
    variants share is made once; the same command goes on after Ctrl-C.
    """
    from cli.flow_run import exit_code, on_server
    from config.workspace.project import STUDIES, study_name
    from config.workspace.study import read_study
    from reporting.comparison.runs import Comparison
    from tasks.study.runs import PAGE, RECORD, works

    root = project_root()
    content = read_study(root / file)
    works(root, content)  # a mistake in a variant is known before anything runs
    state = on_server(root, lambda: _start(file))
    if state.is_cancelled():
        print(f"rlhf: {state.message}", file=sys.stderr)
        raise typer.Exit(exit_code(state))
    place = root / STUDIES / study_name(file)
    result = Comparison.model_validate_json((place / RECORD).read_bytes())
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    from cli.tables.comparison import comparison_view
    from cli.terminal import Terminal

    console = Terminal()
    console.print(comparison_view(result, details=False))
    console.print(f"Page: {place / PAGE}", markup=False, soft_wrap=True)
    console.print("Two of the runs side by side: rlhf compare in that folder.", soft_wrap=True)


def _start(file: Path) -> "State[Any]":
    from flows.study import study as flow  # Prefect reads its settings at import

    return flow(str(file), return_state=True)
