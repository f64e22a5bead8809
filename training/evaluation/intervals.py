"""Confidence intervals of a proportion. Pure."""

import math
from statistics import NormalDist
from typing import NamedTuple


class Proportion(NamedTuple):
    """An observed share and the interval around it, all in [0, 1]."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: int, confidence: float = 0.95) -> Proportion:
    """The Wilson score interval of a proportion p = successes / trials; a tie may count as half a success.

    centre +- half = (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z the normal quantile of (1 +
    confidence) / 2. It assumes independent trials; pairs that share a prompt are less than that.

    Raises ValueError if there are no trials, or more successes than trials.
    Source: Wilson 1927, Probable inference, J. Am. Stat. Assoc. 22, 209-212.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials is not a proportion")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, n = successes / trials, trials
    centre = p + z**2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return Proportion(p, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))
