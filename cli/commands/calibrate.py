"""`rlhf calibrate`: time the stages of a recipe and serving on this machine."""

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.project import chosen_params, project_root, typed_path
from config.errors import StageStopped
from config.workspace.machine import MACHINE_FILE, SERVING_FILE

if TYPE_CHECKING:
    from config.workspace.machine import Machine


def calibrate(
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            parser=typed_path,
            metavar="FILE",
            help="Params file to time, such as recipes/demo.yaml; without it, params.yaml.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one parameter; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Run a few steps of every stage of a recipe here, and serve three small models: rlhf plan then plans with the
    pace of this machine. Two minutes for the demo.
    """
    root = project_root()
    params = chosen_params(root, recipe, overrides or [])
    from tasks.calibration.stages import calibrate as timed
    from tasks.run.stop import on_signals
    from tasks.serving.calibrate import calibrate_serving

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with on_signals() as stop:
        try:
            machine = timed(root, params, say, stop)
        except StageStopped as stopped:
            print(f"rlhf: {stopped}", file=sys.stderr)
            raise typer.Exit(stopped.exit_code) from None
    calibrate_serving(root, say)
    show(root, machine, as_json)


def show(root: Path, machine: "Machine", as_json: bool) -> None:
    """The rates and paces, or the full record."""
    if as_json:
        record = machine.model_dump(mode="json") | {"file": str(MACHINE_FILE)}
        typer.echo(json.dumps(record, indent=2))
        return
    from costs.planning.machine import this_machine

    device = this_machine(root)
    assert device is not None
    typer.echo(f"{device.name}: {device.source}")
    typer.echo(f"memory      {machine.usable_bytes / 2**30:.1f} GiB")
    typer.echo(f"products    up to {max(machine.flops_per_second.values()) / 1e9:.0f} GFLOP/s")
    typer.echo(f"bandwidth   {machine.bytes_per_second / 1e9:.1f} GB/s beyond the caches")
    typer.echo("stage       start  phases, as times of what the formulas say")
    for stage in machine.stages:
        paces = ", ".join(f"{name} {pace:.2g}" for name, pace in stage.paces.items())
        line = f"{stage.stage:<10} {stage.start_seconds:4.1f} s  {paces}"
        typer.echo(textwrap.fill(line, 80, subsequent_indent=" " * 19))
    typer.echo(f"written: {MACHINE_FILE}, {SERVING_FILE}; rlhf plan uses both")
