"""How good a judge of replies is, and what it says of two models. Pure functions.

A preference is 1 where the first reply is better, 0 where the second is, 0.5 for a tie. Preferences on the same prompt
are not independent, so the size of a sample is that of an independent one with the same error.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

FEWEST_PROMPTS = 20
"""With fewer prompts a judge is not judged."""
RIDGE = 1e-2
POWER = 0.8


class Interval(NamedTuple):
    """A mean and the interval around it."""

    value: float
    low: float
    high: float


def clustered_interval(
    values: ArrayLike, prompts: Sequence[Hashable], confidence: float, lowest: float = 0.0
) -> Interval:
    """Mean of values between `lowest` and 1, which share prompts: Wilson's interval with Student's quantile, for the
    number of independent values that would have the error of the mean.

    v   variance of the mean, by the sums of its deviations over each of G prompts: G / (G - 1) sum(s_g^2) / N^2
    n   p (1 - p) / v, with p the mean as a share of its range; at most N values, and G prompts where all are alike

    Source: Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts
    estimated from survey data (effective sample size); Wilson 1927.
    """
    numbers = (np.asarray(values, dtype=float) - lowest) / (1 - lowest)
    p, count = float(numbers.mean()), len(numbers)
    sums = _sums_by_prompt(numbers - p, prompts)
    groups = len(sums)
    if groups < 2:
        return Interval(lowest + (1 - lowest) * p, lowest, 1.0)
    variance = groups / (groups - 1) * float(sums @ sums) / count**2
    size = min(p * (1 - p) / variance, count) if variance > 0 else groups
    low, high = _score_interval(p, max(size, 1.0), _student(groups - 1, confidence))
    return Interval(*(lowest + (1 - lowest) * value for value in (p, low, high)))


def _sums_by_prompt(values: NDArray[np.float64], prompts: Sequence[Hashable]) -> NDArray[np.float64]:
    places = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    index = [places[prompt] for prompt in prompts]
    return np.asarray(np.bincount(index, weights=values, minlength=len(places)), dtype=float)


def _score_interval(p: float, size: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share p of `size` independent values; see training/evaluation/intervals.py."""
    centre, half = p + z**2 / (2 * size), z * math.sqrt(p * (1 - p) / size + z**2 / (4 * size**2))
    return max(0.0, (centre - half) / (1 + z**2 / size)), min(1.0, (centre + half) / (1 + z**2 / size))


def _student(degrees: int, confidence: float) -> float:
    return float(stdtrit(degrees, 0.5 + confidence / 2))


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
) -> Agreement:
    """`preferences` are for the reply that people chose, over the one that they rejected."""
    right = np.asarray(preferences, dtype=float)
    difference = np.asarray(chosen_chars) - np.asarray(rejected_chars)
    longer = 0.5 + 0.5 * np.sign(difference)
    shorter = difference < 0
    shorter_prompts = [prompt for prompt, is_one in zip(prompts, shorter, strict=True) if is_one]
    return Agreement(
        pairs=len(right),
        accuracy=clustered_interval(right, prompts, confidence),
        longer=float(longer.mean()),
        gain=clustered_interval(right - longer, prompts, confidence, lowest=-1.0),
        shorter=clustered_interval(right[shorter], shorter_prompts, confidence) if shorter_prompts else None,
        flip_rate=flips / len(right),
    )


def length_controlled(
    preferences: ArrayLike, chars_a: ArrayLike, chars_b: ArrayLike, prompts: Sequence[Hashable], confidence: float
) -> Interval:
    """The win rate that is left where both replies are as long: logistic regression of the preferences on the
    difference of the lengths, read at zero. Its interval is on the scale of the regression, by the larger of the
    model's error and the one that lets values on a prompt depend on each other.

    Source: the idea of length-controlled AlpacaEval, Dubois et al. 2024 (arXiv:2404.04475), whose model has terms for
    the prompts too; Liang and Zeger 1986, Longitudinal data analysis using generalized linear models (sandwich).
    """
    wins = np.asarray(preferences, dtype=float)
    difference = np.asarray(chars_a, dtype=float) - np.asarray(chars_b, dtype=float)
    design = np.stack([np.ones_like(wins), difference / (difference.std() or 1.0)], axis=1)
    weights = np.zeros(2)
    for _ in range(25):  # a little ridge, so that the fit exists where all wins are on one side
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        hessian = (design * (p * (1 - p))[:, None]).T @ design + RIDGE * np.eye(2)
        step = np.linalg.solve(hessian, design.T @ (wins - p) - RIDGE * weights)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    scores = np.stack([_sums_by_prompt(column * (wins - p), prompts) for column in design.T])
    groups, inverse = scores.shape[1], np.linalg.inv(hessian)
    if groups < 3:
        return Interval(_share(weights[0]), 0.0, 1.0)
    sandwich = groups / (groups - 2) * inverse @ (scores @ scores.T) @ inverse
    half = _student(groups - 2, confidence) * math.sqrt(max(sandwich[0, 0], inverse[0, 0]))
    return Interval(*(_share(weights[0] + side) for side in (0.0, -half, half)))


def _share(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))


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
    judged: ArrayLike, votes: Mapping[int, float], differ: Sequence[bool], confidence: float
) -> WithVotes:
    """Mean of people's preferences over all pairs, from what the judge says of each and the votes on some.

    judged  the judge's preference for each of N pairs
    votes   place of a pair -> people's preference; a random part of the pairs whose replies differ
    differ  whether the replies of a pair differ; the others are ties, whoever judges

    Of the pairs that differ, n have a vote and m have none: l mean_m(judged) + mean_n(votes - l judged), whose two
    means are of different pairs and so independent; the l that makes the variance smallest is estimated from the
    votes. It has no bias, however wrong the judge is. With votes on all pairs it is their mean.

    Source: Angelopoulos, Duchi and Zrnic 2023, PPI++ (arXiv:2311.01453).
    """
    says = np.asarray(judged, dtype=float)
    share = sum(differ) / len(says)
    human, voted = np.array(list(votes.values()), dtype=float), says[list(votes)]
    rest = says[[i for i, other in enumerate(differ) if other and i not in votes]]
    n, m = len(human), len(rest)
    alone = clustered_interval(human, range(n), confidence)
    both = alone
    if m > 1 and voted.var() > 0 and human.var() > 0:
        spread = np.concatenate([rest, voted]).var(ddof=1)
        tuned = min(max(float(np.cov(human, voted, ddof=1)[0, 1]) / ((1 + n / m) * spread), 0.0), 1.0)
        # one degree of freedom went into l
        variance = tuned**2 * rest.var(ddof=1) / m + (human - tuned * voted).var(ddof=1) / n * (n - 1) / (n - 2)
        p = min(max(tuned * rest.mean() + (human - tuned * voted).mean(), 0.0), 1.0)
        size = p * (1 - p) / variance if variance > 0 else n + m
        both = Interval(p, *_score_interval(p, max(min(size, n + m), 1.0), _student(n - 2, confidence)))
    return WithVotes(n, *(Interval(*(share * end + (1 - share) / 2 for end in value)) for value in (both, alone)))
