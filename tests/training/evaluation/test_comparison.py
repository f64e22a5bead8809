import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.comparison import (
    Gain,
    HackingVerdict,
    distinct_n,
    gain,
    gain_at_equal_length,
    gain_kept,
    reward_hacking,
    score_judge,
    win_rate,
)
from training.evaluation.intervals import wilson

SCORES = st.lists(st.floats(-10, 10), min_size=1, max_size=30)
UP, NOT_UP = Gain(0.5, 0.46, 0.54, 0.02, 900), Gain(0.0, -0.04, 0.04, 0.02, 900)
UNSURE, DOWN = Gain(0.04, -0.02, 0.1, 0.03, 900), Gain(-0.3, -0.4, -0.2, 0.05, 900)


# ---------------------------------------------------------------- win rates


def test_a_tie_counts_half_a_win() -> None:
    rate = win_rate(score_judge([3, 1, 2, 5], [1, 3, 2, 4]), 4, 0.95, seed=1)
    assert (rate.rate, rate.ties) == (2.5 / 4, 1)
    assert (rate.low, rate.high) == pytest.approx(wilson(2.5, 4, 0.95)[1:])


@given(SCORES, st.integers(0, 1000))
def test_the_order_of_presentation_does_not_matter_to_a_judge_of_scores(scores: list[float], seed: int) -> None:
    other = scores[1:] + scores[:1]
    first, same = (win_rate(score_judge(scores, other), len(scores), 0.9, s) for s in (seed, seed + 1))
    assert first == same
    assert first.rate == pytest.approx(1 - win_rate(score_judge(other, scores), len(scores), 0.9, seed).rate)


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
    t = 4.302653  # Student's, 0.975 of two degrees of freedom: any printed table
    result = gain([2.0, 4.0, 6.0], [1.0, 1.0, 1.0], 0.95)
    assert result == pytest.approx((3.0, 3 - t * 2 / math.sqrt(3), 3 + t * 2 / math.sqrt(3), 2 / math.sqrt(3), 3))
    assert gain([2.0], [1.0], 0.95) == (1.0, -math.inf, math.inf, math.inf, 1)


@pytest.mark.parametrize("prompts", [4, 100])
def test_the_interval_of_a_gain_covers_the_truth_as_often_as_it_says(prompts: int) -> None:
    rng = np.random.default_rng(1)
    intervals = [gain(rng.normal(0.3, 1, prompts), rng.normal(0, 1, prompts), 0.9) for _ in range(1000)]
    assert sum(interval.low <= 0.3 <= interval.high for interval in intervals) / 1000 == pytest.approx(0.9, abs=0.03)


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
        (UP, NOT_UP, UP, True),
        (UP, DOWN, UP, True),
        (UP, UNSURE, UP, None),
        (UP, UP, DOWN, False),  # gold decides where there is one
        (UNSURE, DOWN, UNSURE, None),  # it is not known that the score rose
        (UNSURE, UP, UNSURE, False),
        (DOWN, DOWN, DOWN, False),
        (UP, None, UP, False),
        (UP, None, NOT_UP, True),
        (UP, None, DOWN, True),
        (UP, None, UNSURE, None),
        (UNSURE, None, UNSURE, None),
        (DOWN, None, DOWN, False),
    ],
)
def test_a_proxy_that_rises_without_what_it_stands_for_is_hacked(
    proxy: Gain, gold: Gain | None, at_equal_length: Gain, hacked: bool | None
) -> None:
    verdict = reward_hacking(proxy, gold, at_equal_length)
    assert verdict.hacked is hacked
    assert f"{proxy.mean:+.3f}" in verdict.reason
    assert (verdict.prompts_needed is not None) is (hacked is None)


def test_the_prompts_that_would_decide_by_hand() -> None:
    """The score gained two deviations, so gold has to gain a tenth of its own, 0.1; it gained half of that, with an
    interval twice too wide.
    """
    proxy, gold = Gain(2.0, 1.9, 2.1, 0.05, 400), Gain(0.05, -0.05, 0.15, 0.05, 400)
    result = reward_hacking(proxy, gold, UP)
    assert (result.hacked, result.prompts_needed) == (None, 4 * 400 + 1)


def drawn(rng: np.random.Generator, proxy: float, gold: float, prompts: int) -> HackingVerdict:
    """The verdict on normal differences with these effects and a correlation of 0.5; gold comes in steps of 0.1, as a
    count of criteria does.
    """
    noise_B = rng.normal(0, 1, prompts)
    proxy_B = proxy + noise_B
    gold_B = np.round(0.25 * (gold + 0.5 * noise_B + math.sqrt(0.75) * rng.normal(0, 1, prompts)), 1)
    nothing = np.zeros(prompts)
    return reward_hacking(gain(proxy_B, nothing, 0.95), gain(gold_B, nothing, 0.95), UP)


@pytest.mark.parametrize("prompts", [2, 5, 10, 20, 40, 300])
@pytest.mark.parametrize(("proxy", "gold"), [(1.5, 0.1), (1.5, 0.3), (0.2, 0.1), (3.0, 1.0), (0.0, 0.0)])
def test_a_reward_model_whose_rise_arrives_is_hardly_ever_called_hacked_however_few_the_prompts(
    prompts: int, proxy: float, gold: float
) -> None:
    rng = np.random.default_rng(4)
    assert sum(drawn(rng, proxy, gold, prompts).hacked is True for _ in range(1000)) / 1000 <= 0.025 + 0.01


@pytest.mark.parametrize("prompts", [2, 5, 10, 20, 40, 300])
@pytest.mark.parametrize(("proxy", "gold"), [(1.5, 0.0), (1.5, 0.1), (1.0, -0.3)])
def test_a_hollow_rise_is_hardly_ever_called_sound(prompts: int, proxy: float, gold: float) -> None:
    rng = np.random.default_rng(5)
    assert sum(drawn(rng, proxy, gold, prompts).hacked is False for _ in range(1000)) / 1000 <= 0.025 + 0.01


@pytest.mark.parametrize(("gold", "hacked"), [(-0.5, True), (0.0, True), (0.2, False), (0.7, False)])
def test_enough_prompts_decide(gold: float, hacked: bool) -> None:
    rng = np.random.default_rng(6)
    result = [drawn(rng, 1.5, gold, 2500).hacked for _ in range(100)]
    assert result.count(hacked) >= 98
    assert result.count(not hacked) == 0


def test_a_few_votes_of_many_prompts_count_as_few() -> None:
    rng = np.random.default_rng(8)
    hacked = 0
    for _ in range(300):
        proxy_B, votes_B = rng.normal(1.0, 1, 300), rng.choice([-0.5, 0.5], size=40, p=[0.4, 0.6])
        proxy, quality = gain(proxy_B, np.zeros(300), 0.95), gain(votes_B, np.zeros(40), 0.95)
        hacked += reward_hacking(proxy, quality, UP).hacked is True
    assert hacked <= 0.025 * 300


DIFFERENCES = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=1, max_size=60)


@given(DIFFERENCES, st.sampled_from([0.25, 8.0]), st.sampled_from([0.25, 8.0]))
def test_the_units_of_score_and_gold_do_not_matter(
    differences: list[tuple[int, int]], of_proxy: float, of_gold: float
) -> None:
    proxy_B, gold_B = np.array(differences, dtype=float).T
    nothing = np.zeros(len(differences))
    result = [
        reward_hacking(gain(a * proxy_B, nothing, 0.95), gain(b * gold_B, nothing, 0.95), UP)
        for a, b in ((1.0, 1.0), (of_proxy, of_gold))
    ]
    assert result[0].hacked == result[1].hacked
    needed = [verdict.prompts_needed for verdict in result]
    assert (needed[0] is None) == (needed[1] is None)
    if needed[0] is not None:
        assert needed[0] == pytest.approx(needed[1], rel=1e-6, abs=1)


@given(DIFFERENCES)
def test_fewer_than_ten_prompts_decide_nothing_and_more_of_the_same_decide(differences: list[tuple[int, int]]) -> None:
    proxy_B, gold_B = np.array(differences, dtype=float).T
    count, nothing = len(differences), np.zeros(len(differences))
    proxy, gold = gain(proxy_B, nothing, 0.95), gain(gold_B, nothing, 0.95)
    result = reward_hacking(proxy, gold, proxy)
    if count < 10:
        assert (result.hacked, result.prompts_needed) == (None, 10)
    elif result.prompts_needed is not None:
        assert result.hacked is None
        assert result.prompts_needed > count
        narrower = math.sqrt(count / result.prompts_needed)
        later = [
            Gain(
                g.mean,
                g.mean - (g.mean - g.low) * narrower,
                g.mean + (g.high - g.mean) * narrower,
                g.error * narrower,
                result.prompts_needed,
            )
            for g in (proxy, gold)
        ]
        assert reward_hacking(later[0], later[1], later[0]).hacked is not None


# ---------------------------------------------------------------- diversity


def test_distinct_n_by_hand() -> None:
    texts = ["a b a b", "a b", "c"]
    assert distinct_n(texts, 1) == 3 / 7
    assert distinct_n(texts, 2) == 2 / 4
    assert distinct_n(texts, 5) == 0.0
    assert distinct_n([], 1) == 0.0


def test_a_student_keeps_the_share_of_the_gain_that_it_has() -> None:
    sft = [0.1 * (i % 5) for i in range(200)]
    aligned = [score + 0.4 for score in sft]
    student = [score + 0.3 + 0.05 * (-1) ** i for i, score in enumerate(sft)]
    kept = gain_kept(student, aligned, sft, 0.95, seed=1)
    assert kept is not None
    assert kept.share == pytest.approx(0.75)
    error = 0.05 / 0.4 / 200**0.5  # of a mean of 200 numbers 0.05 from it, over the gain
    assert kept.high - kept.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert kept.low < 0.75 < kept.high
    everything = gain_kept(aligned, aligned, sft, 0.95, seed=1)
    assert everything == pytest.approx((1.0, 1.0, 1.0))


def test_where_nothing_was_gained_nothing_is_kept() -> None:
    scores = [0.1 * (i % 5) for i in range(50)]
    assert gain_kept(scores, scores, scores, 0.95, seed=1) is None
    assert gain_kept(scores, [x - 0.1 for x in scores], scores, 0.95, seed=1) is None
