import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.comparison import (
    Gain,
    distinct_n,
    gain,
    gain_at_equal_length,
    reward_hacking,
    score_judge,
    win_rate,
)
from training.evaluation.intervals import wilson

SCORES = st.lists(st.floats(-10, 10), min_size=1, max_size=30)
UP, FLAT, DOWN = Gain(0.5, 0.4, 0.6), Gain(0.01, -0.05, 0.07), Gain(-0.3, -0.4, -0.2)


# ---------------------------------------------------------------- win rates


def test_a_tie_counts_half_a_win() -> None:
    rate = win_rate(score_judge([3, 1, 2, 5], [1, 3, 2, 4]), 4, 0.95, seed=1)
    assert (rate.rate, rate.ties) == (2.5 / 4, 1)
    assert (rate.low, rate.high) == pytest.approx(wilson(2.5, 4, 0.95)[1:])


@given(SCORES, st.integers(0, 1000))
def test_the_order_of_presentation_does_not_matter_to_a_judge_of_scores(
    scores: list[float], seed: int
) -> None:
    other = scores[1:] + scores[:1]
    one, same = (
        win_rate(score_judge(scores, other), len(scores), 0.9, s) for s in (seed, seed + 1)
    )
    assert one == same
    assert one.rate == pytest.approx(
        1 - win_rate(score_judge(other, scores), len(scores), 0.9, seed).rate
    )


def test_a_judge_that_likes_a_place_gives_half() -> None:
    for liking in (1, -1):
        rate = win_rate(lambda prompt, swapped, liking=liking: liking, 2000, 0.99, seed=3)
        assert rate.low < 0.5 < rate.high
        assert rate.rate not in (0.0, 1.0)


def test_the_judge_is_told_which_reply_is_first() -> None:
    seen = set()

    def judge(prompt: int, swapped: bool) -> int:
        seen.add(swapped)
        return -1 if swapped else 1  # a is always better

    assert win_rate(judge, 50, 0.95, seed=1).rate == 1.0
    assert seen == {True, False}


def test_scores_within_the_tolerance_tie() -> None:
    judge = score_judge([1.0, 1.0], [1.0 + 1e-10, 0.9])
    assert (judge(0, False), judge(1, False), judge(1, True)) == (0, 1, -1)


# ---------------------------------------------------------------- gains


def test_a_gain_by_hand() -> None:
    z = NormalDist().inv_cdf(0.975)
    result = gain([2.0, 4.0, 6.0], [1.0, 1.0, 1.0], 0.95)
    assert result == pytest.approx((3.0, 3 - z * 2 / math.sqrt(3), 3 + z * 2 / math.sqrt(3)))
    assert gain([2.0], [1.0], 0.95) == (1.0, -math.inf, math.inf)


def test_the_interval_of_a_gain_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [gain(rng.normal(0.3, 1, 100), rng.normal(0, 1, 100), 0.9) for _ in range(1000)]
    assert sum(
        interval.low <= 0.3 <= interval.high for interval in intervals
    ) / 1000 == pytest.approx(0.9, abs=0.03)


def test_a_gain_bought_with_length_is_none_at_equal_length() -> None:
    rng = np.random.default_rng(2)
    lengths_b = rng.integers(5, 20, 400)
    lengths_a = lengths_b + rng.integers(0, 10, 400)
    bought = rng.normal(0, 0.2, 400) + 0.1 * (lengths_a - lengths_b)
    assert gain(bought, np.zeros(400), 0.95).low > 0.3
    at_equal = gain_at_equal_length(bought, np.zeros(400), lengths_a, lengths_b, 0.95)
    assert at_equal.low < 0 < at_equal.high
    earned = gain_at_equal_length(bought + 0.5, np.zeros(400), lengths_a, lengths_b, 0.95)
    assert earned.low < 0.5 < earned.high
    assert earned.low > 0.4


def test_the_interval_at_equal_length_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        longer = rng.normal(3, 4, 60)
        result = gain_at_equal_length(
            0.2 + 0.05 * longer + rng.normal(0, 1, 60), np.zeros(60), longer, np.zeros(60), 0.9
        )
        covered += result.low <= 0.2 <= result.high
    assert covered / 1000 == pytest.approx(0.9, abs=0.03)


def test_replies_of_equal_length_have_the_plain_gain() -> None:
    scores = ([1.0, 2.0, 4.0], [0.0, 1.0, 1.0])
    assert gain_at_equal_length(*scores, [5, 6, 7], [4, 5, 6], 0.95) == gain(*scores, 0.95)


# ---------------------------------------------------------------- reward hacking


@pytest.mark.parametrize(
    ("proxy", "gold", "at_equal_length", "hacked"),
    [
        (UP, UP, UP, False),
        (UP, FLAT, UP, True),
        (UP, DOWN, UP, True),
        (UP, UP, FLAT, False),  # gold decides where there is one
        (FLAT, DOWN, FLAT, False),
        (DOWN, DOWN, DOWN, False),
        (UP, None, UP, False),
        (UP, None, FLAT, True),
        (UP, None, DOWN, True),
        (FLAT, None, FLAT, False),
    ],
)
def test_a_proxy_that_rises_without_what_it_stands_for_is_hacked(
    proxy: Gain, gold: Gain | None, at_equal_length: Gain, hacked: bool
) -> None:
    verdict = reward_hacking(proxy, gold, at_equal_length)
    assert verdict.hacked is hacked
    assert f"{proxy.mean:+.3f}" in verdict.reason


# ---------------------------------------------------------------- diversity


def test_distinct_n_by_hand() -> None:
    texts = ["a b a b", "a b", "c"]
    assert distinct_n(texts, 1) == 3 / 7
    assert distinct_n(texts, 2) == 2 / 4
    assert distinct_n(texts, 5) == 0.0
    assert distinct_n([], 1) == 0.0
