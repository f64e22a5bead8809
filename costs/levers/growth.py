"""How cost grows with one factor at a time: the params of each point, and the exponent of a growth
with its interval.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

from config.compose import compose
from config.load import validate
from config.methods.registry import SAMPLING_METHODS
from config.schema import Params
from config.sections.data import HelpdeskSource

RESAMPLES = 500
FILLER = "please "
"""Repeated before each prompt to lengthen sequences."""
STEPS, UPDATES = 8, 4
"""Steps of each stage at a point: a step is timed."""
RESPONSE_TOKENS = 16
"""An untrained policy does not end its responses; the planner assumes this length."""
NEVER = 1_000_000


@dataclass(frozen=True)
class Factor:
    """A factor of growth, and the sizes at which it is measured."""

    name: str
    unit: str
    sizes: tuple[float, ...]
    quick: tuple[float, ...]
    stages: tuple[str, ...]
    """The stages that it concerns; `align` stands for the method."""
    change: Callable[[Params, float], dict[str, Any]]
    """(params, size in units of theirs) -> what changes."""


def factors(params: Params) -> list[Factor]:
    """Those that apply to the params: a pretrained model has one size, and DPO samples nothing."""
    three = ("sft", "reward", "align")
    found = []
    if params.model.random is not None:
        found.append(
            Factor("model", "parameters", (1, 1.5, 2, 3, 4), (1, 1.5, 2, 3), three, _wider)
        )
    found.append(Factor("sequence", "tokens", (1, 2, 3, 4, 6), (1, 2, 3, 4), three, _longer))
    found.append(Factor("batch", "times", (0.5, 1, 2, 4), (0.5, 1, 2), three, _larger_batch))
    if params.align.method in SAMPLING_METHODS:
        found.append(
            Factor("responses", "per prompt", (1, 2, 4), (1, 2, 4), ("align",), _more_responses)
        )
    found.append(Factor("data", "times", (1, 2, 4, 8), (1, 2, 4), ("sft", "reward"), _more_data))
    if params.align.method in SAMPLING_METHODS:
        found.append(Factor("steps", "updates", (1, 2, 4, 8), (1, 2, 4), ("align",), _more_steps))
    return found


def timed(params: Params) -> Params:
    """The same params with a few steps of every stage, on little data."""
    method = params.align.method
    content = params.model_dump(mode="json") | {"distill": None}
    overlay: dict[str, Any] = {
        stage: {"max_steps": STEPS, "checkpoint_every_steps": NEVER} for stage in ("sft", "reward")
    }
    overlay["tracking"] = {"model": "aligned"}
    if method in SAMPLING_METHODS:
        section = params.section(method)
        overlay[method] = {
            "updates": UPDATES,
            "max_new_tokens": min(RESPONSE_TOKENS, section.max_new_tokens),
            "checkpoint_every_updates": NEVER,
            "sample_every_updates": NEVER,
        }
    else:
        overlay[method] = {"max_steps": STEPS, "checkpoint_every_steps": NEVER}
    if isinstance(params.data.source, HelpdeskSource):
        rows = {"sft_rows": 6000, "preference_rows": 12000, "prompt_rows": 2000}
        overlay["data"] = {"source": rows}
    return validate(compose(content, overlay), "timed")


def at(params: Params, factor: Factor, size: float) -> Params:
    """The params of a point. Raises ParamsError where they do not go together."""
    changes = factor.change(params, size)
    return validate(compose(params.model_dump(mode="json"), changes), f"{factor.name}={size:g}")


def _wider(params: Params, size: float) -> dict[str, Any]:
    shape = params.model.random
    assert shape is not None
    step = 2 * shape.heads
    width = max(step, round(shape.width * size / step) * step)
    return {"model": {"random": {"width": width, "mlp_width": round(shape.mlp_width * size)}}}


def _longer(params: Params, size: float) -> dict[str, Any]:
    """Longer prompts; the limits grow with them."""
    words = round(_mean_tokens(params) * (size - 1))
    method, limit = params.align.method, params.model.context_length + words + 8
    longer: dict[str, Any] = {
        "data": {
            "prompt_template": FILLER * words + params.data.prompt_template,
            "max_prompt_chars": params.data.max_prompt_chars + len(FILLER) * words,
        },
        "model": {"context_length": limit},
        "sft": {"max_length": params.sft.max_length + words},
        "reward": {"max_length": params.reward.max_length + words},
    }
    if method == "dpo":
        longer["dpo"] = {"max_length": params.section("dpo").max_length + words}
    return longer


def _mean_tokens(params: Params) -> float:
    """Rough tokens of a text: the unit by which sequences are lengthened."""
    return 36.0 if isinstance(params.data.source, HelpdeskSource) else params.sft.max_length / 4


def _larger_batch(params: Params, size: float) -> dict[str, Any]:
    """More rows per step, in micro-batches of the same size."""
    method = params.align.method
    return {
        stage: {"batch_size": round(params.section(stage).batch_size * size)}
        | (
            {"micro_batch_size": min(section.micro_batch_size, round(section.batch_size * size))}
            if hasattr(section := params.section(stage), "micro_batch_size")
            else {}
        )
        for stage in ("sft", "reward", method)
    }


def _more_responses(params: Params, size: float) -> dict[str, Any]:
    """More responses to the same number of prompts."""
    method = params.align.method
    section = params.section(method)
    prompts = section.batch_size // section.responses_per_prompt
    least = 1 if method == "ppo" else 2
    each = round(least * size)
    prompts = max(section.num_mini_batches, prompts // 2)
    return {method: {"responses_per_prompt": each, "batch_size": prompts * each}}


def _more_data(params: Params, size: float) -> dict[str, Any]:
    return {
        stage: {"max_steps": round(size * (params.section(stage).max_steps or STEPS))}
        for stage in ("sft", "reward")
    }


def _more_steps(params: Params, size: float) -> dict[str, Any]:
    return {params.align.method: {"updates": round(UPDATES * size)}}


@dataclass(frozen=True)
class Exponent:
    """seconds ~ size^value, and the interval of the measurement's noise."""

    value: float
    low: float
    high: float


Steps = Mapping[str, Sequence[float]]
"""Phase -> seconds of each step."""


def typical_seconds(steps: Steps) -> float:
    """Of all steps, by the median step of each phase: a step that something else held up counts as
    any other.
    """
    return sum(len(seconds) * median(seconds) for seconds in steps.values() if seconds)


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


def fitted(
    sizes: Sequence[float], points: Sequence[Steps], confidence: float, seed: int
) -> Exponent:
    """The slope of log seconds over log sizes by least squares. The interval is that of a bootstrap
    over the steps of each point, so it holds the noise of the measurement, and not whether growth
    is a power at all.
    """
    value = exponent(sizes, [typical_seconds(each) for each in points])
    rng = random.Random(seed)
    drawn = sorted(
        exponent(sizes, [typical_seconds(_resampled(each, rng)) for each in points])
        for _ in range(RESAMPLES)
    )
    tail = (1 - confidence) / 2
    low, high = drawn[int(tail * RESAMPLES)], drawn[int((1 - tail) * RESAMPLES) - 1]
    return Exponent(value, low, high)


def _resampled(steps: Steps, rng: random.Random) -> dict[str, list[float]]:
    return {
        phase: rng.choices(seconds, k=len(seconds)) for phase, seconds in steps.items() if seconds
    }


def quadratic(model: float, data: float) -> str:
    """Whether cost grows with the square of the model, from the exponents of model and data."""
    together = model + data
    holds = "holds" if together >= 1.95 else "does not quite hold at these sizes"
    return (
        f"With the same tokens, time grows with the {model:.2f}th power of the parameters: less "
        f"than quadratic. With tokens in proportion to the parameters it grows with the "
        f"{together:.2f}th power: quadratic or worse {holds}."
    )
