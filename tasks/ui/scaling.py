"""How the cost of a stage grows, as artifacts in the Prefect UI."""

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from config.errors import CostError
from config.schema import Params
from costs.ledger.measured_growth import measured as measured_runs
from costs.ledger.measured_growth import measured_exponent
from costs.planning.settings import settings
from costs.planning.sweep import Axis, Growth, sweep
from costs.planning.target import Target, target
from reporting.numbers import duration, memory, usd


@task(name="growth", cache_policy=NO_CACHE, persist_result=False)
def growth(params: Params, axis: Axis, stage: str, hardware: str | None, gpus: int) -> None:
    """Plan the stage at growing sizes. Raises CostError for an unknown device, axis or stage."""
    aim = target(params, hardware, gpus, None, Path.cwd())
    known = settings(params, aim)
    if stage not in known:
        raise CostError(f"stage={stage} runs no model: choose one of {', '.join(known)}.")
    aim = aim.of(params, stage)
    found = sweep(known[stage], aim.price, axis)
    create_markdown_artifact(
        growth_markdown(stage, aim, found),
        key="growth",
        description=f"How {stage} grows with {axis}",
    )


@task(name="measured", cache_policy=NO_CACHE, persist_result=False)
def measured(stage: str) -> None:
    """Show what the runs of this checkout took."""
    create_markdown_artifact(
        measured_markdown(stage, Path.cwd()),
        key="measured",
        description=f"What {stage} took in past runs",
    )


def growth_markdown(stage: str, aim: Target, growths: list[Growth]) -> str:
    """A table for each kind of growth, with its exponents."""
    parts = [f"# {stage} on {aim.gpus} x {aim.hardware.name}\n"]
    for each in growths:
        rows = "\n".join(
            f"| {point.factor:g} | {point.parameters:,.4g} | {duration(point.seconds)} | "
            f"{usd(point.usd)} | {memory(point.peak_bytes)} |"
            for point in each.points
        )
        line = (
            f"time ~ {each.axis}^{each.seconds_exponent:.2f}, memory ~ "
            f"{each.axis}^{each.memory_exponent:.2f}"
        )
        if each.measured_exponent is not None:
            line += (
                f"; timed here by rlhf calibrate: time ~ {each.axis}^{each.measured_exponent:.2f}"
            )
        title = f"{each.axis}, {each.kind}" if each.kind else each.axis
        parts.append(
            f"## {title}\n\n| factor | parameters | time | cost | memory a device "
            f"|\n|---:|---:|---:|---:|---:|\n{rows}\n\n{line}\n"
        )
    return "\n".join(parts)


def measured_markdown(stage: str, root: Path) -> str:
    """Past runs of the stage beside their plans."""
    runs = measured_runs(root, stage)
    if not runs:
        return (
            f"# No run made {stage} yet\n\n"
            "Runs of this checkout on this machine are listed here, planned beside measured.\n"
        )
    rows = "\n".join(
        f"| {run.run_id} | {run.parameters:,.4g} | {duration(run.planned_seconds)} | "
        f"{duration(run.measured_seconds)} "
        f"| {run.planned_seconds / run.measured_seconds - 1:+.0%} | "
        f"{memory(run.measured_peak_bytes)} |"
        for run in runs
    )
    slope = measured_exponent(runs)
    growth_line = (
        "All of them have a model of one size."
        if slope is None
        else f"time ~ parameters^{slope:.2f}, with all else that differs between them"
    )
    return (
        f"# {stage} as measured\n\n| run | parameters | planned | measured | error | peak memory "
        f"|\n|---|---:|---:|---:|---:|---:|\n{rows}\n\n"
        f"{growth_line}\n"
    )
