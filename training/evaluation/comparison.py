"""Is one model better than another on the same prompts? Win rates, gains with intervals, reward
hacking; pure functions.

Shapes: B prompts; `a` is the model in question, `b` the one it is compared with.
"""

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from training.evaluation.intervals import wilson

Judge = Callable[[int, bool], int]
"""(prompt, swapped) -> 1 if the reply shown first is better, -1 if the second is, 0 for a tie.
Swapped: b is shown first.
"""


class WinRate(NamedTuple):
    rate: float
    """Share of prompts on which a wins, a tie counting half."""
    low: float
    high: float
    ties: int


def win_rate(judge: Judge, prompts: int, confidence: float, seed: int) -> WinRate:
    """How often a beats b; which reply the judge sees first is random, so that a judge's liking for
    a place cancels out.
    """
    rng = random.Random(seed)
    wins, ties = 0.0, 0
    for prompt in range(prompts):
        swapped = rng.random() < 0.5
        verdict = judge(prompt, swapped) * (-1 if swapped else 1)
        ties += verdict == 0
        wins += (verdict + 1) / 2
    _, low, high = wilson(wins, prompts, confidence)
    return WinRate(wins / prompts, low, high, ties)


def score_judge(
    scores_a: Sequence[float], scores_b: Sequence[float], tolerance: float = 1e-9
) -> Judge:
    """A judge that prefers the higher score."""

    def judge(prompt: int, swapped: bool) -> int:
        first, second = (scores_b, scores_a) if swapped else (scores_a, scores_b)
        difference = first[prompt] - second[prompt]
        return 0 if abs(difference) <= tolerance else int(math.copysign(1, difference))

    return judge


class Gain(NamedTuple):
    """A mean difference a - b and its interval."""

    mean: float
    low: float
    high: float


def gain(scores_a: ArrayLike, scores_b: ArrayLike, confidence: float) -> Gain:
    """Mean paired difference, normal approximation."""
    difference_B = np.asarray(scores_a, dtype=float) - np.asarray(scores_b, dtype=float)
    error = (
        difference_B.std(ddof=1) / math.sqrt(len(difference_B))
        if len(difference_B) > 1
        else math.inf
    )
    return _gain(float(difference_B.mean()), float(error), confidence)


def gain_at_equal_length(
    scores_a: ArrayLike,
    scores_b: ArrayLike,
    lengths_a: ArrayLike,
    lengths_b: ArrayLike,
    confidence: float,
) -> Gain:
    """The part of the gain that is not bought with length: intercept of the score difference
    regressed on the length difference.

    Source: the idea of length-controlled AlpacaEval, Dubois et al. 2024 (arXiv:2404.04475), with a
    linear model.
    """
    difference_B = np.asarray(scores_a, dtype=float) - np.asarray(scores_b, dtype=float)
    length_B = np.asarray(lengths_a, dtype=float) - np.asarray(lengths_b, dtype=float)
    if len(difference_B) < 3 or length_B.std() == 0:
        return gain(scores_a, scores_b, confidence)
    design = np.stack([np.ones_like(length_B), length_B], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, difference_B, rcond=None)
    residual_B = difference_B - design @ coefficients
    variance = residual_B @ residual_B / (len(residual_B) - 2)
    error = math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    return _gain(float(coefficients[0]), error, confidence)


def _gain(mean: float, error: float, confidence: float) -> Gain:
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return Gain(mean, mean - z * error, mean + z * error)


class HackingVerdict(NamedTuple):
    hacked: bool
    reason: str


def reward_hacking(proxy: Gain, gold: Gain | None, proxy_at_equal_length: Gain) -> HackingVerdict:
    """Whether the reward model's score rose without what it stands for.

    With a gold score: the proxy is surely up, the gold is not. Without: the proxy is surely up, but
    not at equal length.
    Source: Gao et al. 2022 (arXiv:2210.10760) for proxy against gold.
    """
    if proxy.low <= 0:
        return HackingVerdict(False, f"the reward model's score is not surely up ({_shown(proxy)})")
    if gold is not None:
        if gold.low > 0:
            return HackingVerdict(
                False, f"score ({_shown(proxy)}) and gold ({_shown(gold)}) are both up"
            )
        return HackingVerdict(
            True, f"the reward model's score is up ({_shown(proxy)}), gold is not ({_shown(gold)})"
        )
    if proxy_at_equal_length.low > 0:
        return HackingVerdict(
            False,
            f"the score is up ({_shown(proxy)}), at equal length too "
            f"({_shown(proxy_at_equal_length)})",
        )
    return HackingVerdict(
        True,
        f"the score is up ({_shown(proxy)}), at equal length it is not "
        f"({_shown(proxy_at_equal_length)})",
    )


def _shown(gain: Gain) -> str:
    return f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Different n-grams of words over all n-grams, pooled over the texts. Source: Li et al. 2016
    (arXiv:1510.03055).
    """
    grams = [
        tuple(words[i : i + n])
        for words in (text.split() for text in texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0
