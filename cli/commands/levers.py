"""`rlhf levers` and `rlhf scale`: what each lever saves at the same quality, and how cost grows."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cli.project import chosen_params, project_root, typed_path

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Group

    from tasks.run.stop import StopRequest

T = TypeVar("T")

Recipe = Annotated[
    Path | None,
    typer.Option("--recipe", parser=typed_path, metavar="FILE",
                 help="Params file to vary, such as recipes/demo.yaml; without it, params.yaml."),
]  # fmt: skip
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one parameter; repeatable."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object for programs instead of a table.")
]


def levers(
    recipe: Recipe = None,
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(help="How often each variant is trained, with seeds of its own.", min=1)
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compare this variant with the baseline; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the same alignment with one lever changed at a time, and show what each saves at the
    same quality. Ctrl-C checkpoints; the same command resumes there.
    """
    root = project_root()
    params = chosen_params(root, recipe, overrides or [])
    from cli.tables.levers import levers_view
    from tasks.levers.publish import publish
    from tasks.levers.study import Study

    found = until_stopped(lambda stop: Study(root, params, seeds, only or [], stop).run())
    page = publish(root, params, found)
    _show(found, as_json, lambda: levers_view(found), page)


def scale(
    recipe: Recipe = None,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes of each factor: ten minutes for the demo.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Measure this factor: model, sequence, batch, responses, data or steps; "
            "repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time a few steps of every stage at several sizes, one factor at a time, and fit how cost
    grows, measured and planned. Ctrl-C keeps what is measured.
    """
    root = project_root()
    params = chosen_params(root, recipe, overrides or [])
    from cli.tables.levers import scale_view
    from reporting.levers_page import write_levers_page
    from tasks.levers.scale import Measuring

    found = until_stopped(lambda stop: Measuring(root, params, quick, only or [], stop).run())
    _show(found, as_json, lambda: scale_view(found), write_levers_page(root))


def until_stopped(work: Callable[["StopRequest"], T]) -> T:
    from config.errors import StageStopped
    from tasks.run.stop import on_signals

    with on_signals() as stop:
        try:
            return work(stop)
        except StageStopped as stopped:
            print(f"rlhf: {stopped}", file=sys.stderr)
            raise typer.Exit(stopped.exit_code) from None


def _show(found: "BaseModel", as_json: bool, view: "Callable[[], Group]", page: Path) -> None:
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    console.print(view())
    console.print(f"Page: {page}", markup=False, soft_wrap=True)
