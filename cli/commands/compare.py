"""`rlhf compare`: runs side by side, as tables, as JSON, or as an HTML page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cli.project import project_root, typed_path


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Runs by id, or last, last-1, ...: the others are compared with the first.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for programs instead of tables.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            parser=typed_path,
            help="Write a page of one file and print its path.",
        ),
    ] = None,
) -> None:
    """Runs side by side: parameters, data, results with intervals, cost differences and their
    reasons, replies. By default the last two that completed.
    """
    from reporting.compared.inputs import read_side_by_side
    from reporting.compared.side_by_side import as_dict
    from reporting.runs_named import resolve

    root = project_root()
    found = read_side_by_side(root, resolve(root, runs or []))
    if html is not None:
        from reporting.build import write_page
        from reporting.compared.page import side_by_side_page

        write_page(
            html, side_by_side_page(found), f"rlhf compare {' '.join(runs or [])} --html {html}"
        )
        if not as_json:
            typer.echo(html.resolve())
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=2))
    elif html is None:
        from rich.console import Console

        from cli.tables.compare import compare_view

        Console(highlight=False).print(compare_view(found))
