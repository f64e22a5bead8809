import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.reliability import BINS, Bin, expected_calibration_error, pair_accuracy, reliability


def test_a_tie_counts_half() -> None:
    assert pair_accuracy(np.array([1.0, -2.0, 0.0, 3.0])) == 2.5 / 4


def test_bins_by_hand() -> None:
    nine_tenths, six_tenths = math.log(9), math.log(1.5)  # sigmoid of these is 0.9 and 0.6
    bins = reliability(np.array([nine_tenths + 1e-9, -nine_tenths - 1e-9, six_tenths + 1e-9, 0.0]))
    assert [b.pairs for b in bins] == [1, 1, 2]
    assert [b.confidence for b in bins] == pytest.approx([0.5, 0.6, 0.9])
    assert [b.accuracy for b in bins] == [0.5, 1.0, 0.5]


def test_the_error_is_the_mean_distance_weighted_by_count() -> None:
    assert expected_calibration_error([Bin(0.9, 0.7, 3), Bin(0.6, 0.7, 1)]) == pytest.approx((3 * 0.2 + 0.1) / 4)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=100))
def test_every_pair_is_in_one_bin_and_the_bins_add_up_to_the_accuracy(margins: list[float]) -> None:
    values = np.array(margins)
    bins = reliability(values)
    assert sum(b.pairs for b in bins) == len(margins)
    assert len(bins) <= BINS
    assert sum(b.pairs * b.accuracy for b in bins) / len(margins) == pytest.approx(pair_accuracy(values))
    assert all(0.5 <= b.confidence <= 1 for b in bins)


def test_margins_that_are_the_true_log_odds_are_calibrated_and_doubled_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    odds = np.abs(rng.normal(0, 1.5, 20_000))
    chosen = rng.random(20_000) < 1 / (1 + np.exp(-odds))
    margins = np.where(chosen, odds, -odds)
    assert expected_calibration_error(reliability(margins)) < 0.015
    assert expected_calibration_error(reliability(2 * margins)) > 0.06
