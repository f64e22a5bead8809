"""`rlhf plan`: what a run will need before it starts, as a table, JSON, an HTML page, a comparison,
or a search.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from cli.ignored_options import refuse_ignored
from cli.project import enter_project, typed_path
from serving.settings import Weights

if TYPE_CHECKING:
    from config.schema import Params
    from costs.planning.explain import Explanation
    from costs.planning.plans import Plan
    from costs.planning.search import Found
    from costs.planning.target import Target


class Search(NamedTuple):
    """Limits of --optimise, and the file it writes."""

    adapters: bool
    max_usd: float | None
    max_hours: float | None
    out: Path


PLANNED = {
    "params_file",
    "assignments",
    "stage",
    "hardware",
    "gpus",
    "usd_per_gpu_hour",
    "as_json",
}
READ = {
    "": PLANNED | {"html", "retrain"},
    "--compare": PLANNED | {"compare", "markdown", "retrain"},
    "--optimise": PLANNED | {"optimise", "adapters", "max_usd", "max_hours", "out"},
    "--explain": PLANNED | {"explain", "part"},
    "--stage serve": (PLANNED - {"gpus"}) | {"requests_per_second", "weights", "slots"},
}
"""Mode of `plan` -> the options that it reads."""
NEEDED = {
    "requests_per_second": "--stage serve",
    "weights": "--stage serve",
    "slots": "--stage serve",
    "markdown": "--compare",
    "adapters": "--optimise",
    "max_usd": "--optimise",
    "max_hours": "--optimise",
    "out": "--optimise",
    "part": "--explain",
}


def plan(
    context: typer.Context,
    part: Annotated[
        str | None,
        typer.Argument(
            metavar="[STAGE[.PHASE]]", help="With --explain: what of; without it, the run."
        ),
    ] = None,
    params_file: Annotated[
        Path | None,
        typer.Option(
            "--params",
            "--recipe",
            parser=typed_path,
            metavar="FILE",
            help="Params file to plan; params.yaml by default.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change one parameter; repeatable."
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            help="Plan this stage alone; the file may then leave other sections out. Repeatable. "
            "serve: the server of the final model.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME",
            help="Device, such as a100-80; without it, this machine's CPU.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", help="Devices of every stage; without it, as many as it has processes."
        ),
    ] = None,
    usd_per_gpu_hour: Annotated[
        float | None,
        typer.Option("--usd-per-gpu-hour", help="Your own price, instead of the catalogue's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    retrain: Annotated[
        bool,
        typer.Option(
            "--retrain",
            help="With what `rlhf retrain` adds: the examination before the run, the contest "
            "after it.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", parser=typed_path, help="Write the breakdown as a page."
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            metavar="OTHER.yaml",
            parser=typed_path,
            help="Show what changes from this plan to the other file's.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --compare: as markdown for a pull request.")
    ] = False,
    optimise: Annotated[
        str | None,
        typer.Option(
            "--optimise",
            metavar="usd|time|memory",
            help="Search the levers and write the best params file.",
        ),
    ] = None,
    adapters: Annotated[
        bool,
        typer.Option(
            "--adapters",
            help="With --optimise: try LoRA and 4-bit storage too, which change the trained model.",
        ),
    ] = False,
    max_usd: Annotated[
        float | None, typer.Option("--max-usd", help="With --optimise: most that the run may cost.")
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option("--max-hours", help="With --optimise: longest that the run may take."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            parser=typed_path,
            help="With --optimise: where the winning params go.",
        ),
    ] = Path("params.optimised.yaml"),
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show the calculation as a trail: every quantity with its formula and source, and "
            "what 10% more of each input does.",
        ),
    ] = False,
    requests_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0.001, help="With --stage serve: how many devices answer so many."
        ),
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help="With --stage serve: of the GGUF file, on a CPU.")
    ] = "f32",
    slots: Annotated[
        int, typer.Option(help="With --stage serve: replies side by side.", min=1, max=1024)
    ] = 16,
) -> None:
    """What a run will need: memory, time and money of every stage and phase, and whether it
    fits.
    """
    modes = {
        "--optimise": optimise,
        "--compare": compare,
        "--explain": explain or None,
    }
    mode = next((option for option, value in modes.items() if value is not None), "")
    if not mode and "serve" in (stage or ()):
        mode = "--stage serve"
    enter_project()
    refuse_ignored(context, READ[mode], NEEDED, mode or "a plan")
    from config.errors import ParamsError
    from config.load import load_partly
    from costs.planning.planner import plan as run_plan
    from costs.planning.target import target

    stages = tuple(stage or ())
    file = params_file or Path("params.yaml")
    if mode == "--stage serve":
        if len(stages) > 1:
            raise ParamsError(
                f"--stage {' --stage '.join(stages)}: serve is planned alone. Leave the others out."
            )
        params, _ = load_partly(file, assignments or [], ())
        aim = target(params, hardware, None, usd_per_gpu_hour, Path())
        _serving(params, aim, weights, slots, requests_per_second, as_json)
        return
    params, notes = load_partly(file, assignments or [], stages)
    aim = target(params, hardware, gpus, usd_per_gpu_hour, Path())
    for line in _is_guessed(params, hardware):
        typer.echo(line, err=True)
    make = _of_cycle if retrain else run_plan
    chosen = stages or params.stages
    if explain:
        from costs.planning.explain import explain_params

        _show_trail(explain_params(params, aim, chosen, part or ""), as_json)
    elif optimise is not None:
        _optimise(params, aim, optimise, chosen, Search(adapters, max_usd, max_hours, out), as_json)
    elif compare is not None:
        other, _ = load_partly(compare, assignments or [], stages)
        other_aim = target(other, hardware, gpus, usd_per_gpu_hour, Path())
        _compare(
            make(params, aim, chosen),
            make(other, other_aim, chosen),
            file.name,
            compare.name,
            as_json,
            markdown,
        )
    else:
        from costs.ledger.history import read_history, skipped_note
        from costs.planning.accuracy import with_errors

        past = read_history(Path())
        note = skipped_note(past.skipped)
        made = _noted(make(params, aim, chosen), (*notes, note) if note else notes)
        show(with_errors(made, past.rows), as_json, html, file.name)


def _serving(
    params: "Params",
    aim: "Target",
    weights: str,
    slots: int,
    requests_per_second: float | None,
    as_json: bool,
) -> None:
    """Print the plan of the server of a run's final model."""
    from costs.planning.serving import as_json as as_record
    from costs.planning.serving import plan_serving

    concurrencies = [2**power for power in range(slots.bit_length()) if 2**power <= slots]
    found = plan_serving(params, aim, weights, slots, concurrencies, requests_per_second)
    if as_json:
        typer.echo(json.dumps(as_record(found), indent=2))
        return
    from cli.tables.bench import plan_view

    _print(plan_view(found))


def _of_cycle(params: "Params", aim: "Target", stages: tuple[str, ...]) -> "Plan":
    """The plan of the stages; with --retrain also of a retrain cycle's own processes."""
    from costs.planning.planner import plan
    from costs.planning.retraining import plan_cycle

    return plan_cycle(plan(params, aim, stages), params, aim)


def _is_guessed(params: "Params", hardware: str | None) -> list[str]:
    """A warning printed first where all figures are guesses, with the fix."""
    from config.inputs import expected_files
    from config.workspace.machine import bf16_instructions
    from costs.planning.machine import this_machine

    lines = [
        f"{setting}={path} does not exist: its rows are assumed. Put the file there, or fix the "
        "path."
        for setting, path in expected_files(Path(), params).items()
        if not Path(path).exists()
    ]
    if hardware is not None or params.prices.device is not None:
        return lines
    machine = this_machine(Path())
    if machine is None:
        lines.append(
            "The rates of this machine are not measured: rlhf calibrate does that in two minutes."
        )
    on_cpu = machine is None or machine.is_cpu
    if params.model.dtype == "bf16" and on_cpu and bf16_instructions() is None:
        lines.append(
            "model.dtype=bf16 is emulated by this processor, at a small part of the speed of fp32. "
            "Set model.dtype: fp32."
        )
    return lines


def _noted(made: "Plan", notes: tuple[str, ...]) -> "Plan":
    from dataclasses import replace

    return replace(made, assumptions=(*made.assumptions, *notes))


def show(made: "Plan", as_json: bool, html: Path | None, title: str) -> None:
    """Print a plan, and write its page if requested."""
    if html is not None:
        from reporting.plan_page import plan_page

        _write(html, plan_page(made, f"Plan of {title}"))
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
        return
    if html is not None:
        typer.echo(html)
        return
    _print(_views().plan_view(made))


def _views() -> Any:
    from cli.tables import (
        plan as plan_tables,  # rich takes a tenth of a second to import; --json does without
    )

    return plan_tables


def _print(view: object) -> None:
    from rich.console import Console

    Console(soft_wrap=False).print(view)


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    from config.atomic_file import write_atomically
    from config.errors import EnvironmentFault

    try:
        write_atomically(path, text)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror}. Name another file."
        ) from None


def _compare(
    before: "Plan", after: "Plan", first: str, second: str, as_json: bool, as_markdown: bool
) -> None:
    from dataclasses import asdict

    from costs.planning.compare import compare, markdown

    rows = compare(before, after)
    if as_markdown:
        typer.echo(markdown(rows, first, second), nl=False)
    elif as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(_views().difference_table(rows))


def _optimise(
    params: "Params",
    aim: "Target",
    goal: str,
    stages: tuple[str, ...],
    how: Search,
    as_json: bool,
) -> None:
    """Search every stage, check the run against the limits, write the winner."""
    from config.load import write
    from costs.planning.search import Limits, cheapest, within_total

    best = cheapest(params, aim, stages, goal, how.adapters)  # type: ignore[arg-type]
    within_total(list(best.found.values()), Limits(how.max_usd, how.max_hours))
    write(best.params, how.out)
    if as_json:
        found = {name: _found_json(each) for name, each in best.found.items()}
        typer.echo(
            json.dumps(found | {"changes": list(best.changes), "written": str(how.out)}, indent=2)
        )
        return
    _print(_views().search_view(best.found))
    typer.echo(f"written: {how.out}")


def _found_json(found: "Found") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "tried": found.tried,
        "before": {
            "usd": found.start.usd,
            "seconds": found.start.seconds,
            "device_bytes": found.start.device_bytes,
        },
        "after": {
            "usd": found.best.usd,
            "seconds": found.best.seconds,
            "device_bytes": found.best.device_bytes,
        },
        "choices": [asdict(choice) for choice in found.choices],
    }


def _show_trail(explanation: "Explanation", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(explanation.as_json(), indent=2))
        return
    _print(_views().explain_view(explanation))
