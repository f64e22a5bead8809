"""`rlhf calibrate`: time the stages of a recipe on this machine."""

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.project import chosen_params, project_root, typed_path
from config.errors import StageStopped
from config.workspace.machine import MACHINE_FILE
from config.workspace.timed import TIMED_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from config.records import TimedRow


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
    """Run a few steps of every stage of a recipe here: rlhf plan then says what they take on this machine. A
    minute for the demo.
    """
    root = project_root()
    params = chosen_params(root, recipe, overrides or [])
    from tasks.calibration.stages import calibrate as timed
    from tasks.run.stop import on_signals

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with on_signals() as stop:
        try:
            rows = timed(root, params, say, stop)
        except StageStopped as stopped:
            print(f"rlhf: {stopped}", file=sys.stderr)
            raise typer.Exit(stopped.exit_code) from None
    show(root, rows, as_json)


def show(root: Path, rows: "Sequence[TimedRow]", as_json: bool) -> None:
    """What the stages took, and the machine's rates."""
    from costs.planning.machine import this_machine

    if as_json:
        record = {"file": str(MACHINE_FILE), "stages": [row.model_dump(mode="json") for row in rows]}
        typer.echo(json.dumps(record, indent=2))
        return
    device = this_machine(root)
    assert device is not None
    typer.echo(f"{device.name}: {device.source}")
    typer.echo(f"memory      {device.usable_bytes / 2**30:.1f} GiB")
    typer.echo(f"products    up to {max(rate for _, rate in device.peak_flops_per_second) / 1e9:.0f} GFLOP/s")
    typer.echo(f"bandwidth   {device.bandwidth_bytes_per_second / 1e9:.1f} GB/s beyond the caches")
    typer.echo("stage       microseconds of a token or row; seconds of what is done once")
    for stage in dict.fromkeys(row.stage for row in rows):
        phases = [
            f"{row.phase} {row.seconds:.2g} s"
            if row.units == 1
            else f"{row.phase} {1e6 * row.seconds / row.units:.3g}"
            for row in rows
            if row.stage == stage
        ]
        typer.echo(textwrap.fill(f"{stage:<11} {', '.join(phases)}", 80, subsequent_indent=" " * 12))
    typer.echo(f"written: {MACHINE_FILE}, {TIMED_FILE}; rlhf plan uses both")
