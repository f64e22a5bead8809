"""Every interval that people are shown, drawn many times from a known truth: it holds the truth as often as it says,
less two points, or says that the sample is too small.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from reporting.comparison.statistics import exponent, mean, paired
from reporting.verdict import FEWEST_PROMPTS
from training.evaluation.comparison import gain, gain_at_equal_length
from training.evaluation.intervals import wilson
from training.evaluation.judgement import clustered_interval, length_controlled, prediction_powered

DRAWS = 2000
LEVEL, LEAST = 0.95, 0.93
SIZES = (10, 40, 400)

Draw = Callable[[Generator, int], tuple[float, float]]
"""The ends of one interval, less the truth: it holds the truth where they enclose zero."""


def outcomes(rng: Generator, size: int, wins: float, ties: float) -> NDArray[np.float64]:
    """1, 0 and 0.5."""
    return rng.choice([1.0, 0.5, 0.0], size=size, p=[wins, ties, 1 - wins - ties])


def win_rate(wins: float, ties: float) -> Draw:
    def draw(rng: Generator, size: int) -> tuple[float, float]:
        _, low, high = wilson(float(outcomes(rng, size, wins, ties).sum()), size, LEVEL)
        truth = wins + ties / 2
        return low - truth, high - truth

    return draw


def clustered(wins: float, ties: float, of_one: int) -> Draw:
    """`of_one` values to a prompt, of which half are alike."""

    def draw(rng: Generator, size: int) -> tuple[float, float]:
        shared = np.repeat(outcomes(rng, size, wins, ties), of_one)
        values = np.where(rng.random(len(shared)) < 0.5, shared, outcomes(rng, len(shared), wins, ties))
        result = clustered_interval(values, np.repeat(range(size), of_one).tolist(), LEVEL)
        truth = wins + ties / 2
        return result.low - truth, result.high - truth

    return draw


def judge_and_longer(accuracy: float) -> Draw:
    """The judge's accuracy less that of preferring the longer reply, which is right in 0.6."""

    def draw(rng: Generator, size: int) -> tuple[float, float]:
        gains = outcomes(rng, size, accuracy, 0.0) - outcomes(rng, size, 0.6, 0.1)
        result = clustered_interval(gains, range(size), LEVEL, lowest=-1.0)
        truth = accuracy - 0.65
        return result.low - truth, result.high - truth

    return draw


def at_equal_length(logit: float, slope: float, of_one: int = 1) -> Draw:
    def draw(rng: Generator, size: int) -> tuple[float, float]:
        longer = np.repeat(rng.normal(0, 1, size), of_one)
        wins = (rng.random(len(longer)) < 1 / (1 + np.exp(-(logit + slope * longer)))).astype(float)
        prompts = np.repeat(range(size), of_one).tolist()
        result = length_controlled(wins, 100 + 10 * longer, np.full(len(longer), 100.0), prompts, LEVEL)
        truth = 1 / (1 + math.exp(-logit))
        return result.low - truth, result.high - truth

    return draw


def with_votes(right: float, voted: float, equal: float, alone: bool) -> Draw:
    """`size` votes; the judge agrees with people in `right`; `voted` of the pairs that differ have a vote."""

    def draw(rng: Generator, size: int) -> tuple[float, float]:
        differing = round(size / voted)
        people = outcomes(rng, differing, 0.65, 0.05)
        judge = np.where(rng.random(differing) < right, people, outcomes(rng, differing, 0.5, 0.1))
        alike = round(differing * equal / (1 - equal))
        says = np.concatenate([judge, np.full(alike, 0.5)])
        differ = [True] * differing + [False] * alike
        result = prediction_powered(says, dict(enumerate(people[:size])), differ, LEVEL)
        share = differing / (differing + alike)
        truth = share * 0.675 + (1 - share) / 2
        interval = result.votes_alone if alone else result.both
        return interval.low - truth, interval.high - truth

    return draw


def gold_gain(shift: float, skew: bool) -> Draw:
    def draw(rng: Generator, size: int) -> tuple[float, float]:
        before = rng.normal(0.5, 0.2, size)
        after = before + shift + (rng.gamma(4.0, 0.1, size) - 0.4 if skew else rng.normal(0, 0.3, size))
        result = gain(after, before, LEVEL)
        return result.low - shift, result.high - shift

    return draw


def gain_without_length(rng: Generator, size: int) -> tuple[float, float]:
    length = rng.normal(5, 10, size)
    scores = 0.3 + 0.05 * length + rng.normal(0, 1, size)
    result = gain_at_equal_length(scores, np.zeros(size), length, np.zeros(size), LEVEL)
    return result.low - 0.3, result.high - 0.3


def over_seeds(rng: Generator, size: int) -> tuple[float, float]:
    result = mean(rng.normal(0.02, 0.05, size).tolist())
    return (result.low or -math.inf) - 0.02, (result.high or math.inf) - 0.02


def paired_difference(seeds: int) -> Draw:
    def draw(rng: Generator, size: int) -> tuple[float, float]:
        theirs = rng.normal(0.9, 0.1, (seeds, size))
        effect = 0.02 + rng.normal(0, 0.03, (seeds, 1)) * (seeds > 2)
        ours = theirs + effect + rng.normal(0, 0.1, (seeds, size))
        result = paired(ours.tolist(), theirs.tolist())
        return (result.low or -math.inf) - 0.02, (result.high or math.inf) - 0.02

    return draw


def growth(rng: Generator, size: int) -> tuple[float, float]:
    sizes = [float(2**i) for i in range(size)] if size <= 40 else np.geomspace(1, 1e6, size).tolist()
    costs = [3.0 * x**1.2 * math.exp(rng.normal(0, 0.1)) for x in sizes]
    result = exponent(sizes, costs)
    return (result.low or -math.inf) - 1.2, (result.high or math.inf) - 1.2


def cases() -> Iterator[tuple[str, Draw]]:
    for wins, ties in ((0.5, 0.0), (0.5, 0.4), (0.9, 0.05), (0.97, 0.0), (0.99, 0.01)):
        yield f"win rate of {wins}, ties {ties}", win_rate(wins, ties)
        yield f"clustered {wins}, ties {ties}", clustered(wins, ties, 4)
        yield f"one to a prompt {wins}, ties {ties}", clustered(wins, ties, 1)
    for accuracy in (0.6, 0.8, 0.97):
        yield f"judge of {accuracy} less the longer reply", judge_and_longer(accuracy)
    for logit, slope in ((0.0, 0.0), (0.4, 1.0), (3.0, 0.5)):
        yield f"at equal length {logit}, {slope}", at_equal_length(logit, slope)
    yield "at equal length, two to a prompt", at_equal_length(0.4, 1.0, 2)
    for right in (0.0, 0.7, 1.0):
        for voted, equal in ((0.2, 0.3), (0.5, 0.0), (1.0, 0.3)):
            name = f"votes on {voted}, judge of {right}, {equal} equal"
            yield name, with_votes(right, voted, equal, alone=False)
    yield "votes alone", with_votes(0.7, 0.2, 0.3, alone=True)
    yield "gold gain", gold_gain(0.05, skew=False)
    yield "skewed gold gain", gold_gain(0.05, skew=True)
    yield "gain at equal length", gain_without_length
    yield "mean over seeds", over_seeds
    for seeds in (1, 3):
        yield f"paired over {seeds} seeds", paired_difference(seeds)
    yield "exponent of growth", growth


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "draw"), list(cases()), ids=lambda value: value if isinstance(value, str) else "")
def test_an_interval_holds_the_truth_as_often_as_it_says(name: str, draw: Draw, size: int) -> None:
    rng = np.random.default_rng(7)
    ends = [draw(rng, size) for _ in range(DRAWS)]
    # of ten replies of which nearly all win: the verdict says that they are few (reporting/verdict.py)
    least = 0.90 if name.startswith("win rate") and size < FEWEST_PROMPTS else LEAST
    assert sum(low <= 0 <= high for low, high in ends) / DRAWS >= least, name
