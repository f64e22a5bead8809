"""Serving speed of a device, from measured loads or a roofline."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from config.errors import CostError
from config.workspace.machine import SERVING_FILE, ServedPoint, ServingRates
from costs.formulas.compute import decode_step, forward_pass
from costs.formulas.counts import forward_matmul_flops
from costs.formulas.setting import Setting
from costs.formulas.time import Seconds, decode_duration, duration
from costs.planning.machine import calibration
from costs.tables.shapes import ModelShape

USUAL = Path(__file__).parents[1] / "tables" / "serving.yaml"


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a request."""

    input: float
    output: float


@dataclass(frozen=True)
class Pace:
    """Seconds of one device, as functions of the concurrency."""

    per_reply: Callable[[float, Lengths], float]
    """1 / (replies a second)."""
    first_token: Callable[[Lengths], float]
    """Seconds of a reply on an idle server."""
    bound: Callable[[float, Lengths], str]


def serving_rates(root: Path) -> ServingRates | None:
    """What `rlhf calibrate` measured here, None without it. Raises CostError for a damaged file."""
    return calibration(root / SERVING_FILE, ServingRates)


def usual_rates() -> ServingRates:
    """Rates of the machine in costs/tables/serving.yaml, for machines that were not calibrated."""
    rates = calibration(USUAL, ServingRates)
    assert rates is not None
    return rates


def measured_pace(rates: ServingRates, shape: ModelShape, weights: str, slots: int, slower: float) -> Pace:
    """Interpolate the measured loads of a small and a large model, on a machine that is now `slower`."""
    large = [point for point in rates.large if point.weights == weights]
    if not large:
        raise CostError(
            f"no model in {weights} was measured: {SERVING_FILE} has "
            f"{', '.join(sorted({point.weights for point in rates.large}))}. Run rlhf calibrate."
        )
    longest = max(large, key=lambda point: point.input_tokens)
    others = [point for point in large if point is not longest]
    alone = min(others, key=lambda point: point.concurrency)
    prefill = max(
        0.0,
        (longest.ttft_seconds - alone.ttft_seconds) / (longest.input_tokens - alone.input_tokens) / alone.parameters,
    )
    front, small = _front(rates.small), rates.small[0]

    def beside_front(point: ServedPoint) -> float:
        """Seconds of one step of the engine beyond those of the small model."""
        length = Lengths(point.input_tokens, point.output_tokens)
        reading = length.input * prefill * (point.parameters - small.parameters)
        rest = point.seconds_per_reply - front(point.concurrency, length.output) - reading
        return max(0.0, rest) * point.concurrency / length.output

    deep = {point.concurrency: point for point in rates.deep}
    launches, steps = [], []
    for point in sorted(others, key=lambda point: point.concurrency):
        launch, step = _shares(deep[point.concurrency], point, small, beside_front)
        launches.append((1.0 * point.concurrency, launch))
        steps.append((1.0 * point.concurrency, step))
    size, layers = matrix_parameters(shape) - small.parameters, shape.layers - small.layers

    def per_reply(concurrency: float, length: Lengths) -> float:
        batch = min(concurrency, slots)
        step = layers * interpolated(launches, batch) + size * interpolated(steps, batch)
        least = front(concurrency, length.output)
        seconds = least + length.input * prefill * size + length.output * step / batch
        return slower * max(seconds, LEAST_SHARE * least)

    def first_token(length: Lengths) -> float:
        least = min(point.ttft_seconds for point in rates.small if point.concurrency == 1)
        return slower * max(LEAST_SHARE * least, least + length.input * prefill * size)

    def bound(concurrency: float, length: Lengths) -> str:
        least = slower * front(concurrency, length.output)
        return "engine" if per_reply(concurrency, length) > 2 * least else "front"

    return Pace(per_reply, first_token, bound)


LEAST_SHARE = 0.2
"""Least share of the front's time for a model smaller than the small one."""


def _shares(
    deep: ServedPoint, large: ServedPoint, small: ServedPoint, seconds: Callable[[ServedPoint], float]
) -> tuple[float, float]:
    """Seconds of a step for each layer and for each parameter, from two models that differ in both: the solution of
    two linear equations, neither below 0.
    """
    (l1, n1), (l2, n2) = (
        (point.layers - small.layers, point.parameters - small.parameters) for point in (deep, large)
    )
    t1, t2 = seconds(deep), seconds(large)
    step = max(TINY, (t2 * l1 - t1 * l2) / (n2 * l1 - n1 * l2))
    launch = max(TINY, (t1 - step * n1) / l1)
    return launch, step


TINY = 1e-13
"""Seconds, where other programs disturbed a load so that nothing is left."""


def _front(small: Sequence[ServedPoint]) -> Callable[[float, float], float]:
    """Seconds of a reply of so many tokens, whatever the model: linear in the tokens between the two lengths that were
    measured.
    """
    concurrencies = sorted({point.concurrency for point in small})
    lines = []
    for concurrency in concurrencies:
        first, second = sorted(
            (point for point in small if point.concurrency == concurrency), key=lambda point: point.output_tokens
        )
        slope = (second.seconds_per_reply - first.seconds_per_reply) / (second.output_tokens - first.output_tokens)
        slope = max(0.0, slope)
        lines.append((1.0 * concurrency, first.seconds_per_reply - slope * first.output_tokens, slope))

    def seconds(concurrency: float, tokens: float) -> float:
        points = [(n, max(1e-6, fixed + slope * tokens)) for n, fixed, slope in lines]
        return interpolated(points, concurrency)

    return seconds


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at `size`, linear in the logarithms of both; beyond the ends that of the end."""
    sizes = [x for x, _ in points]
    place = bisect_left(sizes, size)
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    weight = log(size / x0) / log(x1 / x0)
    return exp((1 - weight) * log(y0) + weight * log(y1))


def matrix_parameters(shape: ModelShape) -> int:
    """Parameters that a token is multiplied with: layers and output head."""
    return round(forward_matmul_flops(shape, 1.0) / 2)


def roofline(setting: Setting, slots: int) -> Pace:
    """Prefill and decode by costs/formulas; each prompt is read alone."""

    def prefill(length: Lengths) -> float:
        work = forward_pass(setting, setting.model, setting.levers, 1.0, max(1.0, length.input), 1.0)
        return duration(work, setting).seconds

    def step(concurrency: float, length: Lengths) -> Seconds:
        context = length.input + length.output / 2
        batch = min(concurrency, slots)
        return decode_duration(decode_step(setting, setting.model, setting.levers, batch, context), setting)

    def per_reply(concurrency: float, length: Lengths) -> float:
        token_seconds = step(concurrency, length).seconds / min(concurrency, slots)
        return prefill(length) + length.output * token_seconds

    def bound(concurrency: float, length: Lengths) -> str:
        return step(concurrency, length).bound

    return Pace(per_reply, prefill, bound)
