"""Intervals that may be looked at every day: their coverage holds for all looks together.

For outcomes 0 and 1 with mean p, s ones among n, and a Beta(1/2, 1/2) mixture over other means,

    M_n(p) = B(s + 1/2, n - s + 1/2) / B(1/2, 1/2) / (p^s (1 - p)^(n - s))

is a martingale that starts at 1, so that it ever reaches 1 / alpha with a probability of at most alpha (Ville's
inequality): the p with M_n(p) < 1 / alpha are the interval.

Source: Robbins 1970, Statistical methods related to the law of the iterated logarithm, Ann. Math. Stat. 41,
1397-1409; Howard, Ramdas, McAuliffe and Sekhon 2021, Time-uniform, nonparametric, nonasymptotic confidence sequences,
arXiv:1810.08240, section 3.2.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

TOLERANCE = 1e-6


class Interval(NamedTuple):
    """An observed share or difference, and the interval around it."""

    value: float
    low: float
    high: float


def share_at_any_time(ones: int, trials: int, confidence: float = 0.95) -> Interval:
    """A share of independent outcomes, [0, 1] without any.

    Raises ValueError for more ones than trials.
    """
    if not 0 <= ones <= trials:
        raise ValueError(f"{ones} of {trials} is not a share")
    if not trials:
        return Interval(0.5, 0.0, 1.0)
    zeros = trials - ones
    limit = math.log(1 / (1 - confidence)) - _log_beta(ones + 0.5, zeros + 0.5) + _log_beta(0.5, 0.5)

    def is_inside(p: float) -> bool:
        return -ones * math.log(p) - zeros * math.log(1 - p) < limit

    share = ones / trials
    low = 0.0 if not ones else _boundary(is_inside, 0.0, share)
    high = 1.0 if not zeros else _boundary(is_inside, 1.0, share)
    return Interval(share, low, high)


def difference_at_any_time(new: tuple[int, int], old: tuple[int, int], confidence: float = 0.95) -> Interval:
    """The difference of two shares, each of (ones, trials): both intervals have half of the error."""
    first, second = (share_at_any_time(*counts, confidence=(1 + confidence) / 2) for counts in (new, old))
    return Interval(first.value - second.value, first.low - second.high, first.high - second.low)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _boundary(is_inside: Callable[[float], bool], outside: float, inside: float) -> float:
    """The end of the interval between a share outside of it and one inside, on its outer side."""
    while abs(inside - outside) > TOLERANCE:
        middle = (outside + inside) / 2
        outside, inside = (outside, middle) if is_inside(middle) else (middle, inside)
    return outside
