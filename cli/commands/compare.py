"""`rlhf compare`: runs side by side, as tables, as JSON, or as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from cli.project import project_root, typed_path


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs by id, or last, last-1, ...: the others are compared with the first."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for programs instead of tables.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", parser=typed_path, help="Write a page of one file and print its path."),
    ] = None,
) -> None:
    """Runs side by side: cost and quality with intervals, parameters, results, cost by stage, replies. By default the
    last two that completed.
    """
    from reporting.comparison.runs import compare_runs
    from reporting.runs_named import resolve

    root = project_root()
    comparison = compare_runs(root, resolve(root, runs or []))
    if html is not None:
        from reporting.build import write_page
        from reporting.comparison.page import comparison_page

        names = [variant.name for variant in comparison.variants]
        command = f"rlhf compare {' '.join(names)}"
        page = comparison_page(comparison, f"{' and '.join(names)} side by side", command)
        write_page(html, page, f"{command} --html {html}")
        if not as_json:
            typer.echo(html.resolve())
    if as_json:
        typer.echo(comparison.model_dump_json(indent=2))
    elif html is None:
        from cli.tables.comparison import comparison_view
        from cli.terminal import Terminal

        Terminal().print(comparison_view(comparison, details=True))
