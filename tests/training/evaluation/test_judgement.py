"""Statistics of judges: planted biases must come to light."""

import random

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from training.evaluation.judgement import (
    Agreement,
    Interval,
    agreement,
    clustered_interval,
    length_controlled,
    prediction_powered,
    smallest_effect,
)
from training.judging.judge import Pair, verdicts

PEOPLE = 400


class Biased:
    """Prefers the better reply (its text says how good it is) with a share of mistakes, the longer or the first
    one.
    """

    name, usd = "biased", 0.0

    def __init__(self, right: float = 1.0, longer: bool = False, first: float = 0.0) -> None:
        self.right, self.longer, self.first = right, longer, first

    def prefer(self, pairs: list[Pair]) -> list[float | None]:
        result: list[float | None] = []
        for pair in pairs:
            rng = random.Random(f"{pair.prompt} {sorted((pair.first, pair.second))}")
            sampled = rng.random()
            if sampled < self.first:
                result.append(1.0)
            elif self.longer:
                result.append(float(len(pair.first) > len(pair.second)))
            else:
                better = float(pair.first.split()[0] > pair.second.split()[0])
                result.append(better if rng.random() < self.right else 1 - better)
        return result


def people(seed: int = 1, longer: float = 0.5) -> list[Pair]:
    """Pairs whose first reply is preferred; it is the longer one in a share of them."""
    rng = random.Random(seed)
    result = []
    for i in range(PEOPLE):
        lengths = sorted((rng.randint(1, 30), rng.randint(31, 60)), reverse=rng.random() < longer)
        texts = [f"{score} {'x' * size}" for score, size in zip((2, 1), lengths, strict=True)]
        result.append(Pair(f"prompt {i // 2}", *texts))
    return result


def judged(judge: Biased, pairs: list[Pair]) -> Agreement:
    said = verdicts(judge, pairs, 1)
    return agreement(
        said.preferences, said.flips, [len(pair.first) for pair in pairs],
        [len(pair.second) for pair in pairs], [str(pair.prompt) for pair in pairs], 0.95,
    )  # fmt: skip


def test_a_good_judge_has_a_verdict() -> None:
    result = judged(Biased(right=0.8), people())
    assert result.fault is None
    assert result.accuracy.value == pytest.approx(0.8, abs=0.06)
    assert result.shorter is not None
    assert result.shorter.value == pytest.approx(0.8, abs=0.08)
    assert result.flip_rate == 0


def test_a_judge_that_guesses_or_prefers_the_longer_reply_has_none() -> None:
    assert "chance could do" in str(judged(Biased(right=0.5), people()).fault)
    long = judged(Biased(longer=True), people(longer=0.7))
    assert long.accuracy.value == pytest.approx(0.7, abs=0.06)
    assert "preferring the longer reply does with" in str(long.fault)
    assert long.shorter is not None
    assert long.shorter.value == 0
    few = people()[:10]
    assert "too few to judge the judge" in str(judged(Biased(), few).fault)


def test_a_bias_to_the_first_place_makes_ties_and_is_counted() -> None:
    result = judged(Biased(first=0.4), people())
    assert result.flip_rate == pytest.approx(0.4, abs=0.07)
    assert result.accuracy.value == pytest.approx(0.8, abs=0.05)  # 0.6 right, 0.4 ties
    assert judged(Biased(first=1.0), people()).fault is not None


def test_values_of_one_prompt_are_no_independent_evidence() -> None:
    values = np.random.default_rng(3).integers(2, size=50).astype(float)
    alone = clustered_interval(values, range(50), 0.95)
    often = clustered_interval(np.repeat(values, 8), np.repeat(range(50), 8).tolist(), 0.95)
    assert often == pytest.approx(alone)
    naive = clustered_interval(np.repeat(values, 8), range(400), 0.95)
    assert naive.high - naive.low < 0.5 * (often.high - often.low)


def test_at_equal_length_the_advantage_of_length_is_gone() -> None:
    rng = np.random.default_rng(1)
    longer = rng.normal(80, 60, 500)
    wins = (rng.random(500) < 1 / (1 + np.exp(-longer / 60))).astype(float)  # length alone decides
    zeros = np.zeros(500)
    assert wins.mean() > 0.7
    result = length_controlled(wins, longer, zeros, range(500), 0.95)
    assert result.low < 0.5 < result.high
    fit = LogisticRegression(C=1e6).fit((longer / longer.std())[:, None], wins)
    assert result.value == pytest.approx(1 / (1 + np.exp(-fit.intercept_[0])), abs=2e-3)


def test_all_wins_have_a_length_controlled_rate_too() -> None:
    result = length_controlled([1.0] * 30, range(30), [0] * 30, range(30), 0.95)
    assert 0.9 < result.value <= 1


def test_the_smallest_effect_by_hand() -> None:
    wins = [1.0, 0.0] * 200
    error = 0.5 / 20
    assert smallest_effect(wins, range(400), 0.95) == pytest.approx(2.8016 * error, rel=1e-3)
    twice = [f"prompt {i // 4}" for i in range(400)]
    assert smallest_effect(wins, twice, 0.95) == pytest.approx(0)  # each prompt cancels out


def test_votes_of_people_correct_a_wrong_judge_and_a_judge_narrows_few_votes() -> None:
    rng = np.random.default_rng(2)
    truth = (rng.random(2000) < 0.6).astype(float)
    judge = np.where(rng.random(2000) < 0.85, truth, 1 - truth)
    flattering = np.clip(judge + (rng.random(2000) < 0.3), 0, 1)
    for says in (judge, flattering):
        result = prediction_powered(says, dict(enumerate(truth[:200])), [True] * 2000, 0.95)
        assert result.both.low < 0.6 < result.both.high
        width = result.both.high - result.both.low
        assert width < result.votes_alone.high - result.votes_alone.low
    assert flattering.mean() > 0.68
    noise = (rng.random(2000) < 0.5).astype(float)
    useless = prediction_powered(noise, dict(enumerate(truth[:200])), [True] * 2000, 0.95)
    assert isinstance(useless.both, Interval)
    assert useless.both.high - useless.both.low == pytest.approx(
        useless.votes_alone.high - useless.votes_alone.low, rel=0.05
    )


def test_votes_on_all_pairs_are_the_answer_and_equal_replies_are_ties() -> None:
    votes = {place: float(place % 3 > 0) for place in range(90)}
    result = prediction_powered(np.ones(90), votes, [True] * 90, 0.95)
    assert result.both == result.votes_alone
    assert result.both.value == pytest.approx(2 / 3)
    alike = prediction_powered(
        np.concatenate([np.ones(90), np.full(90, 0.5)]), votes, [True] * 90 + [False] * 90, 0.95
    )
    assert alike.both.value == pytest.approx((2 / 3 + 0.5) / 2)
    assert alike.both.low == pytest.approx((result.both.low + 0.5) / 2)


def test_three_of_three_votes_are_not_certain() -> None:
    result = clustered_interval([1.0] * 40, range(40), 0.95)
    assert (result.value, result.high) == (1.0, 1.0)
    assert 0.85 < result.low < 0.95
