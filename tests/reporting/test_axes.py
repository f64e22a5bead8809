"""Axes: ticks cover their data at round values, and values land where the line puts them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reporting.charts import Scale, spread, thinned, tick_labels, ticks


def test_a_scale_is_the_line_through_its_ends() -> None:
    upwards = Scale(10.0, 20.0, 100.0, 0.0)
    assert (upwards(10), upwards(20), upwards(12.5)) == (100.0, 0.0, 75.0)


def test_ticks_are_round_and_cover_the_data() -> None:
    assert ticks(0.07, 1.6) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert ticks(-2.4, 1.63) == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]
    assert ticks(0.5, 1.0) == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_always_enclose_their_data_in_equal_steps(low: float, width: float) -> None:
    high = low + max(width, abs(low) * 1e-6)
    marks = ticks(low, high)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= high - 1e-6 * step
    assert 2 <= len(marks) <= 9
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in pairwise(marks))


def test_equal_ends_are_opened() -> None:
    assert spread(2.0, 2.0) == (1.8, 2.2)
    assert spread(0.0, 0.0) == (-0.5, 0.5)
    assert len(ticks(3.0, 3.0)) >= 2


def test_tick_labels_have_the_decimals_that_tell_them_apart() -> None:
    assert tick_labels([0.0, 0.5, 1.0]) == ["0.0", "0.5", "1.0"]
    assert tick_labels([0.0, 0.025, 0.05]) == ["0.000", "0.025", "0.050"]
    assert tick_labels([-2.0, 0.0, 2000.0]) == ["−2", "0", "2,000"]
    assert tick_labels([0.5, 0.75, 1.0], shares=True) == ["50%", "75%", "100%"]
    assert tick_labels([0.0, 2e-5, 4e-5]) == ["0", "2e-5", "4e-5"]
    assert tick_labels([-5e-5, 0.0, 5e-5, 1e-4]) == ["−0.5e-4", "0", "0.5e-4", "1.0e-4"]


def test_long_curves_are_averaged_over_equal_runs() -> None:
    points = [(float(i), float(i % 2)) for i in range(1, 1001)]
    short = thinned(points, most=100)
    assert len(short) == 100
    assert short[0] == (10.0, 0.5)
    assert short[-1] == (1000.0, 0.5)
    assert thinned(points[:50], most=100) == points[:50]
