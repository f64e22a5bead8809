"""Where numbers go on a picture: round tick values, and the straight line from values to pixels."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Scale(NamedTuple):
    """The line that takes `low` to pixel `start` and `high` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, about `about` of them, that cover [low,
    high].

    The first is at or below `low`, the last at or above `high`, so they serve as the ends of an
    axis.
    """
    low, high = spread(low, high)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min(
        (factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda size: abs(size - rough)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def spread(low: float, high: float) -> tuple[float, float]:
    """[low, high], opened a little where both are the same."""
    if high > low:
        return low, high
    return low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)


def tick_labels(values: Sequence[float], shares: bool = False) -> list[str]:
    """The ticks with as many decimals as tell them apart, the same for all; very small or large
    ones with a power of ten.

    `shares` are fractions, shown in percent.
    """
    if shares:
        return [f"{shown}%" for shown in tick_labels([100 * value for value in values])]
    largest = max(abs(value) for value in values)
    if largest >= 1e6 or 0 < largest < 1e-3:
        exponent = math.floor(math.log10(largest))
        scaled = tick_labels([value / 10.0**exponent for value in values])
        return [
            "0" if value == 0 else f"{shown}e{exponent}"
            for value, shown in zip(values, scaled, strict=True)
        ]
    step = min((b - a for a, b in pairwise(values)), default=largest or 1.0)
    decimals = next((d for d in range(6) if abs(round(step, d) - step) < step * 1e-6), 6)
    return [f"{value:,.{decimals}f}".replace("-", "−") for value in values]


def thinned(points: Sequence[tuple[float, float]], most: int = 120) -> list[tuple[float, float]]:
    """At most `most` points: means over equal runs of neighbours, so that a long curve stays light
    and loses no level.
    """
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
