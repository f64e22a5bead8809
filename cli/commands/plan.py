"""`rlhf plan`: what a run will need before it starts, as a table, JSON or an HTML page; and what another file changes,
the best levers, how a figure comes about, and a server's plan.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ignored_options import typed_options
from cli.project import enter_project, typed_path
from serving.settings import Weights

if TYPE_CHECKING:
    from config.schema import Params
    from costs.planning.explain import Explanation
    from costs.planning.plans import Plan
    from costs.planning.search import StageSearch
    from costs.planning.target import Target

app = typer.Typer(invoke_without_command=True)

File = Annotated[
    Path, typer.Option("--params", "--recipe", parser=typed_path, metavar="FILE", help="Params file to plan.")
]
Assignments = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one parameter; repeatable.")
]
Stages = Annotated[
    list[str],
    typer.Option("--stage", help="Plan this stage alone; the file may then leave other sections out. Repeatable."),
]
Device = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME", help="Device, such as a100-80; without it, this machine's CPU."),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", help="Devices of every stage; without it, as many as it has processes.")
]
Price = Annotated[float | None, typer.Option("--usd-per-gpu-hour", help="Your own price, instead of the catalogue's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OfCycle = Annotated[
    bool,
    typer.Option(
        "--retrain", help="With what `rlhf retrain` adds: the examination before the run, the contest after it."
    ),
]
PARAMS = Path("params.yaml")


@app.callback()
def plan(
    context: typer.Context,
    file: File = PARAMS,
    assignments: Assignments = [],  # noqa: B006  # read only
    stage: Stages = [],  # noqa: B006
    hardware: Device = None,
    gpus: Gpus = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
    retrain: OfCycle = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", parser=typed_path, help="Write the breakdown as a page.")
    ] = None,
) -> None:
    """What a run will need: memory, time and money of every stage and phase, and whether it fits."""
    if context.invoked_subcommand is not None:
        from config.errors import UserError

        for option in typed_options(context).values():
            raise UserError(
                f"{option} stands before {context.invoked_subcommand}, which does not see it there. Put it at the end."
            )
        return
    from config.workspace.timed import read_timed, skipped_note

    params, target, notes = _load(file, assignments, stage, hardware, gpus, usd_per_gpu_hour)
    _warn(params, target, hardware)
    planned = _plan(params, target, stage, retrain)
    notes = tuple(note for note in (*notes, skipped_note(read_timed(Path()).skipped)) if note)
    planned = replace(planned, assumptions=(*planned.assumptions, *notes))
    show(planned, as_json, html, file.name)


@app.command()
def compare(
    other: Annotated[Path, typer.Argument(metavar="OTHER.yaml", parser=typed_path, help="The other file.")],
    file: File = PARAMS,
    assignments: Assignments = [],  # noqa: B006
    stage: Stages = [],  # noqa: B006
    hardware: Device = None,
    gpus: Gpus = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
    retrain: OfCycle = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As markdown for a pull request.")] = False,
) -> None:
    """What changes from this plan to the other file's."""
    from costs.planning.compare import compare as differences
    from costs.planning.compare import markdown as as_markdown

    plans = []
    for params_file in (file, other):
        params, target, _ = _load(params_file, assignments, stage, hardware, gpus, usd_per_gpu_hour)
        if params_file is file:
            _warn(params, target, hardware)
        plans.append(_plan(params, target, stage, retrain))
    rows = differences(*plans)
    if markdown:
        typer.echo(as_markdown(rows, file.name, other.name), nl=False)
    elif as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(_views().difference_table(rows))


@app.command()
def optimise(
    goal: Annotated[str, typer.Argument(metavar="usd|time|memory", help="What to spend least of.")],
    file: File = PARAMS,
    assignments: Assignments = [],  # noqa: B006
    stage: Stages = [],  # noqa: B006
    hardware: Device = None,
    gpus: Gpus = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Try LoRA and 4-bit storage too, which change the trained model.")
    ] = False,
    max_usd: Annotated[float | None, typer.Option("--max-usd", help="Most that the run may cost.")] = None,
    max_hours: Annotated[float | None, typer.Option("--max-hours", help="Longest that the run may take.")] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", parser=typed_path, help="Where the winning params go.")
    ] = Path("params.optimised.yaml"),
) -> None:
    """Search the levers, and write the params file that spends least."""
    from config.load import write
    from costs.planning.search import Limits, cheapest, within_total

    params, target, _ = _load(file, assignments, stage, hardware, gpus, usd_per_gpu_hour)
    _warn(params, target, hardware)
    best = cheapest(params, target, tuple(stage) or params.stages, goal, adapters)  # type: ignore[arg-type]
    within_total(list(best.by_stage.values()), Limits(max_usd, max_hours))
    write(best.params, out)
    if as_json:
        by_stage = {name: _search_json(stage_search) for name, stage_search in best.by_stage.items()}
        typer.echo(json.dumps(by_stage | {"changes": list(best.changes), "written": str(out)}, indent=2))
        return
    _print(_views().search_view(best.by_stage))
    typer.echo(f"written: {out}")


@app.command()
def explain(
    part: Annotated[str, typer.Argument(metavar="[STAGE[.PHASE]]", help="What of; without it, the run.")] = "",
    file: File = PARAMS,
    assignments: Assignments = [],  # noqa: B006
    stage: Stages = [],  # noqa: B006
    hardware: Device = None,
    gpus: Gpus = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
) -> None:
    """How a figure comes about: every quantity with its formula and source."""
    from costs.planning.explain import explain_params

    params, target, _ = _load(file, assignments, stage, hardware, gpus, usd_per_gpu_hour)
    _warn(params, target, hardware)
    _show_trail(explain_params(params, target, tuple(stage) or params.stages, part), as_json)


@app.command()
def serve(
    file: File = PARAMS,
    assignments: Assignments = [],  # noqa: B006
    hardware: Device = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
    requests_per_second: Annotated[
        float | None, typer.Option(metavar="N", min=0.001, help="How many devices answer so many.")
    ] = None,
    weights: Annotated[Weights, typer.Option(help="Of the GGUF file, on a CPU.")] = "f32",
    slots: Annotated[int, typer.Option(help="Replies side by side.", min=1, max=1024)] = 16,
) -> None:
    """Memory, pace and price of a server of the final model."""
    enter_project()
    from config.load import load_partly
    from costs.planning.serving import as_json as as_record
    from costs.planning.serving import measured_here, plan_serving
    from costs.planning.target import find_target

    params, _ = load_partly(file, assignments, ())
    target = find_target(params, hardware, None, usd_per_gpu_hour, Path())
    concurrencies = [2**power for power in range(slots.bit_length()) if 2**power <= slots]
    is_here = hardware is None and params.prices.device is None
    measured = measured_here(Path(), params, weights, slots) if is_here else None
    serving_plan = plan_serving(params, target, weights, slots, concurrencies, requests_per_second, measured=measured)
    if as_json:
        typer.echo(json.dumps(as_record(serving_plan), indent=2))
        return
    from cli.tables.bench import plan_view

    _print(plan_view(serving_plan))


def _load(
    file: Path,
    assignments: list[str],
    stages: list[str],
    hardware: str | None,
    gpus: int | None,
    usd_per_gpu_hour: float | None,
) -> tuple["Params", "Target", tuple[str, ...]]:
    """The params to plan, for which device, and notes about them."""
    enter_project()
    from config.load import load_partly
    from costs.planning.target import find_target

    params, notes = load_partly(file, assignments, tuple(stages))
    return params, find_target(params, hardware, gpus, usd_per_gpu_hour, Path()), notes


def _warn(params: "Params", target: "Target", hardware: str | None) -> None:
    """Say before the figures what makes them doubtful."""
    from costs.planning.target import doubted_price

    for line in (*_guess_warnings(params, target, hardware), doubted_price(target)):
        if line is not None:
            typer.echo(line, err=True)


def _plan(params: "Params", target: "Target", stages: list[str], retrain: bool) -> "Plan":
    """The plan of the stages, or of all; with --retrain also of a retrain cycle's own processes."""
    from costs.planning.planner import plan
    from costs.planning.retraining import plan_cycle

    planned = plan(params, target, tuple(stages) or params.stages)
    return plan_cycle(planned, params, target) if retrain else planned


def _guess_warnings(params: "Params", target: "Target", hardware: str | None) -> list[str]:
    """A warning printed first where figures are guesses, with the fix."""
    from config.inputs import expected_files
    from config.workspace.machine import bf16_instructions
    from costs.planning.machine import this_machine
    from costs.planning.settings import untimed

    lines = [
        f"{setting}={path} does not exist: its rows are assumed. Put the file there, or fix the path."
        for setting, path in expected_files(Path(), params).items()
        if not Path(path).exists()
    ]
    if hardware is not None or params.prices.device is not None:
        return lines
    machine = this_machine(Path())
    if stages := untimed(params, target):
        lines.append(
            f"{', '.join(stages)}: never ran here with this model and these levers. rlhf calibrate, with the same "
            "--recipe and --set, times them in a minute or two; a run does too."
        )
    on_cpu = machine is None or machine.is_cpu
    if params.model.dtype == "bf16" and on_cpu and bf16_instructions() is None:
        lines.append(
            "model.dtype=bf16 is emulated by this processor, at a small part of the speed of fp32. "
            "Set model.dtype: fp32."
        )
    return lines


def show(planned: "Plan", as_json: bool, html: Path | None, title: str) -> None:
    """Print a plan, and write its page if requested."""
    if html is not None:
        from reporting.plan_page import plan_page

        _write(html, plan_page(planned, f"Plan of {title}"))
    if as_json:
        typer.echo(json.dumps(planned.as_json(), indent=2))
        return
    if html is not None:
        typer.echo(html)
        return
    _print(_views().plan_view(planned))


def _views() -> Any:
    from cli.tables import plan as plan_tables  # rich takes a tenth of a second to import; --json does without

    return plan_tables


def _print(view: object) -> None:
    from cli.terminal import Terminal

    Terminal(soft_wrap=False).print(view)


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    from config.atomic_file import write_atomically
    from config.errors import EnvironmentFault

    try:
        write_atomically(path, text)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}. Name another file.") from None


def _search_json(stage_search: "StageSearch") -> dict[str, Any]:
    return {
        "tried": stage_search.tried,
        "before": {
            "usd": stage_search.start.usd,
            "seconds": stage_search.start.seconds,
            "device_bytes": stage_search.start.device_bytes,
        },
        "after": {
            "usd": stage_search.best.usd,
            "seconds": stage_search.best.seconds,
            "device_bytes": stage_search.best.device_bytes,
        },
        "choices": [asdict(choice) for choice in stage_search.choices],
    }


def _show_trail(explanation: "Explanation", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(explanation.as_json(), indent=2))
        return
    _print(_views().explain_view(explanation))
