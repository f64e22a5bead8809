"""How good a judge of replies is, and what it says of two models. Pure functions.

A preference is 1 where the first reply is better, 0 where the second is, 0.5 for a tie. Preferences on the same prompt
are not independent, so intervals are of a bootstrap over prompts.

Source: Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 13 (percentiles).
"""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
FEWEST_PROMPTS = 20
"""With fewer prompts a bootstrap over them promises more than it holds."""
POWER = 0.8


class Interval(NamedTuple):
    """A mean and the interval around it."""

    value: float
    low: float
    high: float


def clustered_interval(values: ArrayLike, prompts: Sequence[Hashable], confidence: float, seed: int) -> Interval:
    """Mean of values, with a percentile bootstrap over prompts: a drawn prompt brings all of its values."""
    numbers = np.asarray(values, dtype=float)
    places = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    index = np.array([places[prompt] for prompt in prompts])
    sums = np.bincount(index, weights=numbers, minlength=len(places))
    counts = np.bincount(index, minlength=len(places))
    resamples = np.random.default_rng(seed).integers(len(places), size=(RESAMPLES, len(places)))
    means = sums[resamples].sum(axis=1) / counts[resamples].sum(axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return Interval(float(numbers.mean()), float(low), float(high))


class Agreement(NamedTuple):
    """A judge on pairs that people judged before."""

    pairs: int
    accuracy: Interval
    """Share of the pairs in which it prefers the reply that people prefer; a tie counts half."""
    longer: float
    """The same of a judge that always prefers the longer reply."""
    gain: Interval
    """accuracy - longer."""
    shorter: Interval | None
    """Its accuracy where people prefer the shorter reply; None if they nowhere do."""
    flip_rate: float
    """Share of the pairs on which it changes its mind when the replies change places."""

    @property
    def fault(self) -> str | None:
        """Why its verdicts do not count; None if they do."""
        if self.pairs < FEWEST_PROMPTS:
            return f"{self.pairs} pairs are too few to judge the judge, {FEWEST_PROMPTS} are needed"
        value, low, high = self.accuracy
        span = f"{value:.1%} ({low:.1%} to {high:.1%}) of {self.pairs} human votes"
        if low <= 0.5:
            return f"it agrees with {span}, which chance could do"
        if self.gain.low <= 0:
            return f"it agrees with {span}; preferring the longer reply does with {self.longer:.1%}"
        return None


def agreement(
    preferences: Sequence[float],
    flips: int,
    chosen_chars: Sequence[int],
    rejected_chars: Sequence[int],
    prompts: Sequence[Hashable],
    confidence: float,
    seed: int,
) -> Agreement:
    """`preferences` are for the reply that people chose, over the one that they rejected."""
    right = np.asarray(preferences, dtype=float)
    difference = np.asarray(chosen_chars) - np.asarray(rejected_chars)
    longer = 0.5 + 0.5 * np.sign(difference)
    shorter = difference < 0
    shorter_prompts = [prompt for prompt, is_one in zip(prompts, shorter, strict=True) if is_one]
    return Agreement(
        pairs=len(right),
        accuracy=clustered_interval(right, prompts, confidence, seed),
        longer=float(longer.mean()),
        gain=clustered_interval(right - longer, prompts, confidence, seed),
        shorter=clustered_interval(right[shorter], shorter_prompts, confidence, seed) if shorter_prompts else None,
        flip_rate=flips / len(right),
    )


def length_controlled(
    preferences: ArrayLike,
    chars_a: ArrayLike,
    chars_b: ArrayLike,
    prompts: Sequence[Hashable],
    confidence: float,
    seed: int,
) -> Interval:
    """The win rate that is left where both replies are as long: logistic regression of the preferences on the
    difference of the lengths, read at zero.

    Source: the idea of length-controlled AlpacaEval, Dubois et al. 2024 (arXiv:2404.04475), whose model has terms for
    the prompts too.
    """
    wins = np.asarray(preferences, dtype=float)
    difference = np.asarray(chars_a, dtype=float) - np.asarray(chars_b, dtype=float)
    scale = difference.std() or 1.0
    x = difference / scale
    value = _at_zero(x, wins)
    places = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    members: list[list[int]] = [[] for _ in places]
    for i, prompt in enumerate(prompts):
        members[places[prompt]].append(i)
    rng = np.random.default_rng(seed)
    estimates = []
    for _ in range(RESAMPLES // 10):
        rows = [i for place in rng.integers(len(members), size=len(members)) for i in members[place]]
        estimates.append(_at_zero(x[rows], wins[rows]))
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(estimates, (tail, 100 - tail))
    return Interval(value, float(low), float(high))


def _at_zero(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """sigmoid(a) of the fit y ~ sigmoid(a + b x), with a little ridge so that it exists where all wins are on one
    side.
    """
    design = np.stack([np.ones_like(x), x], axis=1)
    weights = np.zeros(2)
    for _ in range(25):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        hessian = (design * (p * (1 - p))[:, None]).T @ design + 1e-2 * np.eye(2)
        step = np.linalg.solve(hessian, design.T @ (y - p) - 1e-2 * weights)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    return float(1 / (1 + math.exp(-min(max(weights[0], -30), 30))))


def smallest_effect(preferences: ArrayLike, prompts: Sequence[Hashable], confidence: float) -> float:
    """The smallest distance of the win rate from one half that so many prompts would show with a chance of POWER: (z
    of the level + z of the power) standard errors.

    Source: Cohen 1988, Statistical power analysis, chapter 2.
    """
    numbers = np.asarray(preferences, dtype=float)
    sums: dict[Hashable, float] = {}
    for prompt, value in zip(prompts, numbers - numbers.mean(), strict=True):
        sums[prompt] = sums.get(prompt, 0.0) + float(value)
    error = math.sqrt(sum(value**2 for value in sums.values())) / len(numbers)
    normal = NormalDist()
    return (normal.inv_cdf((1 + confidence) / 2) + normal.inv_cdf(POWER)) * error


class WithVotes(NamedTuple):
    """A win rate from a judge and a few human votes, beside that of the votes alone."""

    votes: int
    both: Interval
    votes_alone: Interval


def prediction_powered(
    judged: ArrayLike, judged_with_vote: ArrayLike, votes: ArrayLike, confidence: float
) -> WithVotes:
    """Mean of people's preferences, from N pairs that the judge judged (`judged`) and n that people voted on, too
    (`judged_with_vote`, `votes`): l mean(judged) + mean(votes - l judged_with_vote), with the l that makes the
    variance smallest. It has no bias, however wrong the judge is.

    Source: Angelopoulos, Duchi and Zrnic 2023, PPI++ (arXiv:2311.01453).
    """
    everywhere, voted, human = (np.asarray(values, dtype=float) for values in (judged, judged_with_vote, votes))
    n, ratio = len(human), len(human) / len(everywhere)
    spread = np.concatenate([everywhere, voted]).var(ddof=1)
    together = float(np.cov(human, voted, ddof=1)[0, 1]) if n > 1 else 0.0
    tuned = min(max(together / ((1 + ratio) * spread), 0.0), 1.0) if spread > 0 else 0.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rest = human - tuned * voted
    variance = tuned**2 * everywhere.var(ddof=1) / len(everywhere) + rest.var(ddof=1) / n
    value, half = float(tuned * everywhere.mean() + rest.mean()), z * math.sqrt(float(variance))
    alone, wide = float(human.mean()), z * math.sqrt(float(human.var(ddof=1)) / n)
    return WithVotes(n, Interval(value, value - half, value + half), Interval(alone, alone - wide, alone + wide))
