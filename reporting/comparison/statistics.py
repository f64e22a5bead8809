"""Intervals of differences, and what follows from them: whether a variant is as good as another, how well a plan
ranked costs, how cost grows. All intervals are of 95%. Pure functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

CLOSE = 1.3
"""Costs within this factor are a tie: neither order of the two is wrong."""
CHEAPER = 1.05
"""Times that the base costs more than a variant that is called cheaper: less is the machine's."""
FEWEST_SEEDS = 3
"""With at least so many seeds an interval is over seeds, which vary more than prompts."""

Verdict = Literal["base", "cheaper and as good", "as good", "worse", "undecided", "not run"]
SAME: tuple[Verdict, ...] = ("base", "cheaper and as good", "as good")


@dataclass(frozen=True)
class Estimate:
    """A number, and its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def student(degrees: int) -> float:
    """The 97.5th percentile of Student's t with so many degrees of freedom, within 1%.

    Source: Abramowitz and Stegun 1964, 26.7.5; exact for one degree and two.
    """
    if degrees < 3:
        return {1: 12.706, 2: 4.303}[degrees]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def mean(values: Sequence[float]) -> Estimate:
    """Mean of independent values with Student's interval; of one value without."""
    middle, count = fmean(values), len(values)
    if count < 2:
        return Estimate(middle)
    half = student(count - 1) * stdev(values) / math.sqrt(count)
    return Estimate(middle, middle - half, middle + half)


def paired(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """Mean difference ours - theirs of values [seed][prompt]: over prompts of all seeds, or over seeds where there are
    FEWEST_SEEDS.
    """
    by_seed = [[a - b for a, b in zip(mine, other, strict=True)] for mine, other in zip(ours, theirs, strict=True)]
    if len(by_seed) >= FEWEST_SEEDS:
        return mean([fmean(differences) for differences in by_seed])
    return mean([value for differences in by_seed for value in differences])


def difference(first: Estimate, other: Estimate) -> Estimate:
    """other - first, with an interval if both have one.

    low = d - sqrt((other - other_low)^2 + (first_high - first)^2), high = d + sqrt((other_high - other)^2 + (first -
    first_low)^2). The two are taken as independent. Runs that answer the same prompts are mostly correlated, so the
    interval is too wide rather than too narrow.

    Source: Newcombe 1998, Interval estimation for the difference between independent proportions, Statistics in
    Medicine 17, method 10.
    """
    middle = other.value - first.value
    if first == other:
        return Estimate(0.0, 0.0, 0.0)  # mostly of the same model on the same data
    if first.low is None or first.high is None or other.low is None or other.high is None:
        return Estimate(middle)
    below = math.hypot(other.value - other.low, first.high - first.value)
    above = math.hypot(other.high - other.value, first.value - first.low)
    return Estimate(middle, middle - below, middle + above)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates, one for each seed, with the interval of their mean."""
    middle, count = fmean(estimate.value for estimate in estimates), len(estimates)
    below = [estimate.value - estimate.low for estimate in estimates if estimate.low is not None]
    above = [estimate.high - estimate.value for estimate in estimates if estimate.high is not None]
    if len(below) < count or len(above) < count:
        return Estimate(middle)
    return Estimate(middle, middle - math.hypot(*below) / count, middle + math.hypot(*above) / count)


def is_clear(estimate: Estimate) -> bool | None:
    """Whether the interval of a difference excludes 0; None without an interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return not estimate.low <= 0 <= estimate.high


def verdict(estimate: Estimate | None, margin: float, cheaper: bool) -> Verdict:
    """Not worse if the whole interval of the difference is above minus the margin, worse if it is below, else
    undecided, as without an interval.
    """
    if estimate is None or estimate.low is None or estimate.high is None:
        return "undecided"
    if estimate.low >= -margin:
        return "cheaper and as good" if cheaper else "as good"
    return "worse" if estimate.high < -margin else "undecided"


class Costed(NamedTuple):
    """A variant that was run."""

    name: str
    planned_usd: float
    measured_usd: float
    as_good: bool


class Ranking(NamedTuple):
    """How the plan ordered the costs of the variants."""

    pairs: int
    """Whose measured costs differ by more than CLOSE."""
    right: float | None
    """Share of them that the plan puts in the same order."""
    chosen: str | None
    """The cheapest by the plan of the variants that are as good."""
    cheapest: str | None
    """The cheapest of them as measured."""
    regret: float | None
    """Extra cost of `chosen` over `cheapest`, as a fraction of the latter."""


def ranking(costed: Sequence[Costed]) -> Ranking:
    """Compare planned with measured costs, pair by pair, and at the choice that matters."""
    right, pairs = 0, 0
    for pair in combinations(costed, 2):
        low, high = sorted(pair, key=lambda variant: variant.measured_usd)
        if high.measured_usd > CLOSE * low.measured_usd:
            pairs += 1
            right += low.planned_usd < high.planned_usd
    good = [variant for variant in costed if variant.as_good]
    if not good:
        return Ranking(pairs, right / pairs if pairs else None, None, None, None)
    chosen = min(good, key=lambda variant: variant.planned_usd)
    cheapest = min(good, key=lambda variant: variant.measured_usd)
    return Ranking(
        pairs,
        right / pairs if pairs else None,
        chosen.name,
        cheapest.name,
        chosen.measured_usd / cheapest.measured_usd - 1,
    )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> Estimate:
    """Slope of log(value) over log(size) by least squares, with the interval that the scatter about the line gives: a
    growth that is no power has a wide one. Without one for two points.
    """
    xs, ys = [log(size) for size in sizes], [log(value) for value in values]
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    degrees = len(xs) - 2
    if degrees < 1:
        return Estimate(slope)
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = student(degrees) * math.sqrt(rest / degrees / spread)
    return Estimate(slope, slope - half, slope + half)
