import math

import numpy as np
import pytest
from scipy.special import betaln

from labelling.anytime import difference_at_any_time, share_at_any_time


def test_the_interval_is_where_the_martingale_is_below_its_limit() -> None:
    value, low, high = share_at_any_time(30, 40, confidence=0.9)
    assert value == 0.75
    for end in (low, high):
        log_m = betaln(30.5, 10.5) - betaln(0.5, 0.5) - 30 * math.log(end) - 10 * math.log(1 - end)
        assert log_m == pytest.approx(math.log(10), abs=1e-3)


@pytest.mark.parametrize(("ones", "trials", "low", "high"), [(0, 0, 0.0, 1.0), (0, 5, 0.0, None), (5, 5, None, 1.0)])
def test_few_outcomes_leave_an_end_open(ones: int, trials: int, low: float | None, high: float | None) -> None:
    result = share_at_any_time(ones, trials)
    assert low is None or result.low == low
    assert high is None or result.high == high
    assert 0 <= result.low <= result.high <= 1


def test_more_ones_than_trials_are_no_share() -> None:
    with pytest.raises(ValueError, match="3 of 2 is not a share"):
        share_at_any_time(3, 2)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.8])
def test_looked_at_after_every_outcome_it_leaves_the_truth_in_one_case_of_twenty_at_most(truth: float) -> None:
    rng, runs, looks = np.random.default_rng(7), 2000, 1000
    ones = (rng.random((runs, looks)) < truth).cumsum(axis=1)
    trials = np.arange(1, looks + 1)
    log_m = (
        betaln(ones + 0.5, trials - ones + 0.5) - betaln(0.5, 0.5)
        - ones * math.log(truth) - (trials - ones) * math.log(1 - truth)
    )  # fmt: skip
    ever_left = (log_m >= math.log(20)).any(axis=1)
    assert 0.005 < ever_left.mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    for run, look in ((0, 10), (1, 300), (2, 999)):  # the interval says the same as the martingale
        _, low, high = share_at_any_time(int(ones[run, look]), int(trials[look]))
        assert (low < truth < high) == (log_m[run, look] < math.log(20))


def test_a_difference_of_nothing_is_seldom_found_however_often_one_looks() -> None:
    rng, found = np.random.default_rng(3), 0
    for _ in range(200):
        new, old = ((rng.random(400) < 0.7).cumsum() for _ in range(2))
        found += any(
            difference_at_any_time((int(new[n - 1]), n), (int(old[n - 1]), n)).low > 0 for n in range(10, 401, 10)
        )
    assert found <= 10
    assert difference_at_any_time((190, 200), (140, 200)).low > 0
