"""How cost grows with one factor, and the exponent of that growth: cost ~ factor^exponent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Literal

from config.errors import CostError
from config.workspace.machine import Machine
from costs.formulas.setting import Setting
from costs.planning.phases import phases
from costs.planning.search import evaluate
from costs.tables.catalogue import Price

Axis = Literal["model", "sequence", "batch", "data", "steps"]
AXES: tuple[Axis, ...] = ("model", "sequence", "batch", "data", "steps")
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Point:
    """One size and what it needs; `seconds` without the fixed parts: start of the process, loading
    and saving.
    """

    factor: float
    parameters: float
    seconds: float
    usd: float
    peak_bytes: float


@dataclass(frozen=True)
class Growth:
    """A sweep along one axis."""

    axis: str
    kind: str
    """What is held still: `fixed tokens`, `data grows with the model`, or empty."""
    points: tuple[Point, ...]
    seconds_exponent: float
    memory_exponent: float
    measured_exponent: float | None = None
    """Of time, over the trunks that `rlhf calibrate` timed here; None where it did not."""


def sweep(
    setting: Setting, price: Price, axis: Axis, factors: Sequence[float] = FACTORS
) -> list[Growth]:
    """Growth along an axis; along `model` both at fixed tokens and with twenty tokens to a
    parameter (arXiv 2203.15556 section 3.4).

    Raises CostError for an unknown axis.
    """
    match axis:
        case "model":
            fixed = _growth(
                setting,
                price,
                "model",
                "fixed tokens",
                factors,
                lambda s, f: replace(s, model=s.model.scaled(f)),
            )
            growing = _growth(
                setting, price, "model", "data grows with the model", factors, _with_data
            )
            own = setting.hardware.measured
            if own is None:
                return [fixed, growing]
            measured = measured_exponent(own.machine)
            return [
                replace(fixed, measured_exponent=measured),
                replace(growing, measured_exponent=1 + measured),
            ]
        case "sequence":
            return [_growth(setting, price, axis, "", factors, _longer)]
        case "batch":
            return [
                _growth(
                    setting,
                    price,
                    axis,
                    "fixed micro-batch",
                    factors,
                    lambda s, f: _steps(
                        s.with_levers(accumulation=round(s.levers.accumulation * f)), 1.0
                    ),
                )
            ]
        case "data":
            return [_growth(setting, price, axis, "", factors, _data)]
        case "steps":
            return [_growth(setting, price, axis, "", factors, _steps)]
    raise CostError(f"--sweep {axis} is not one of {', '.join(AXES)}.")


def measured_exponent(machine: Machine) -> float:
    """Exponent of training seconds a token over parameters, of the largest batch that was timed at
    each width.

    With tokens in proportion to parameters it is one more.
    """
    largest = {
        each.width: each
        for each in sorted(machine.passes, key=lambda each: each.sequences * each.tokens)
    }
    timed = [largest[width] for width in sorted(largest)][1:]  # the smallest width is all launches
    parameters = [
        each.layers * (4.0 * each.width**2 + 3.0 * each.width * each.mlp_width) for each in timed
    ]
    return exponent(
        parameters, [each.training_seconds / (each.sequences * each.tokens) for each in timed]
    )


def _with_data(setting: Setting, factor: float) -> Setting:
    larger = setting.model.scaled(factor)
    return _data(replace(setting, model=larger), larger.parameters / setting.model.parameters)


def _longer(setting: Setting, factor: float) -> Setting:
    work = setting.workload
    grown = replace(
        work,
        max_tokens=round(work.max_tokens * factor),
        mean_tokens=work.mean_tokens * factor,
        prompt_tokens=round(work.prompt_tokens * factor),
        response_tokens=round(work.response_tokens * factor),
        mean_response_tokens=work.mean_response_tokens * factor,
    )
    return replace(setting, workload=grown)


def _steps(setting: Setting, factor: float) -> Setting:
    return replace(
        setting, workload=replace(setting.workload, steps=setting.workload.steps * factor)
    )


def _data(setting: Setting, factor: float) -> Setting:
    """More rows: more steps, and more to evaluate in the end."""
    work = setting.workload
    return _steps(replace(setting, workload=replace(work, held_out=work.held_out * factor)), factor)


def _growth(
    setting: Setting,
    price: Price,
    axis: str,
    kind: str,
    factors: Sequence[float],
    change: Callable[[Setting, float], Setting],
) -> Growth:
    points = []
    for factor in factors:
        changed = change(setting, factor)
        candidate = evaluate(changed, price)
        seconds = sum(phase.seconds for phase in phases(changed) if phase.bound != "fixed")
        points.append(
            Point(factor, changed.model.parameters, seconds, candidate.usd, candidate.device_bytes)
        )
    sizes = (
        [point.parameters for point in points]
        if axis == "model"
        else [point.factor for point in points]
    )
    return Growth(
        axis,
        kind,
        tuple(points),
        exponent(sizes, [p.seconds for p in points]),
        exponent(sizes, [p.peak_bytes for p in points]),
    )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log(value) over log(size) by least squares; 0 where nothing varies."""
    xs, ys = [log(size) for size in sizes], [log(max(value, 1e-12)) for value in values]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return (
        sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
        if spread
        else 0.0
    )
