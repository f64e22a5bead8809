"""Intervals, verdicts, rankings and growth by hand."""

import math

import pytest
from scipy.stats import t

from reporting.comparison.statistics import (
    Costed,
    Estimate,
    Verdict,
    average,
    difference,
    exponent,
    is_clear,
    mean,
    paired,
    ranking,
    student,
    verdict,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 400])
def test_students_quantile_is_within_a_hundredth_of_scipys(degrees: int) -> None:
    assert student(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=0.01)


def test_the_interval_of_a_mean_by_hand() -> None:
    assert mean([3.0]) == Estimate(3.0)
    result, half = mean([0.1, 0.3] * 50), 1.98422 * 0.1 * (100 / 99) ** 0.5 / 10
    assert (result.value, result.low, result.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))


def test_two_seeds_are_paired_over_prompts_and_three_over_seeds() -> None:
    ours, theirs = [[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]
    assert paired(ours, theirs) == mean([1.0, 0.0, 1.0, 0.0])
    assert paired([*ours, [1.0, 1.0]], [*theirs, [1.0, 1.0]]) == mean([0.5, 0.5, 0.0])


def test_the_interval_of_a_difference_is_the_published_one() -> None:
    """Newcombe 1998, table II, method 10, 56/70 - 48/80: 0.0524 to 0.3339, from the Wilson intervals of the two
    shares.
    """
    less, more = Estimate(0.6, 0.49043, 0.70035), Estimate(0.8, 0.69173, 0.87691)
    result = difference(less, more)
    assert result.low is not None
    assert result.high is not None
    assert (round(result.low, 4), round(result.high, 4)) == (0.0524, 0.3339)
    assert is_clear(result) is True
    back = difference(more, less)
    assert (back.low, back.high) == (pytest.approx(-result.high), pytest.approx(-result.low))
    assert difference(less, less) == Estimate(0.0, 0.0, 0.0)


def test_without_an_interval_nothing_is_called_clear() -> None:
    assert difference(Estimate(1.0), Estimate(3.0, 2.0, 4.0)) == Estimate(2.0)
    assert is_clear(Estimate(2.0)) is None
    assert is_clear(Estimate(0.1, -0.1, 0.3)) is False


def test_the_average_of_two_seeds_is_as_much_narrower_as_they_are_independent() -> None:
    result = average([Estimate(1.0, 0.6, 1.3), Estimate(3.0, 2.7, 3.4)])
    assert (result.value, result.low, result.high) == (2.0, 1.75, 2.25)
    assert average([Estimate(1.0, 0.6, 1.3), Estimate(3.0)]) == Estimate(2.0)


@pytest.mark.parametrize(
    ("low", "high", "cheaper", "expected"),
    [
        (-0.01, 0.05, True, "cheaper and as good"),
        (-0.01, 0.05, False, "as good"),
        (-0.05, -0.03, True, "worse"),
        (-0.05, 0.05, True, "undecided"),
        (None, None, True, "undecided"),
    ],
)
def test_a_variant_is_as_good_where_all_of_its_interval_is(
    low: float | None, high: float | None, cheaper: bool, expected: Verdict
) -> None:
    assert verdict(Estimate(0.0, low, high), 0.02, cheaper) == expected


def test_pairs_of_close_costs_are_no_pairs_and_the_choice_is_among_the_good() -> None:
    result = ranking(
        [
            Costed("a", 10.0, 10.0, True),
            Costed("b", 4.0, 9.0, True),
            Costed("c", 5.0, 6.0, True),
            Costed("bad", 1.0, 1.0, False),
        ]
    )
    # a-b is close; b-c is ordered wrongly; a-c and all with bad are right
    assert (result.pairs, result.right) == (5, 4 / 5)
    assert (result.chosen, result.cheapest, result.regret) == ("b", "c", 0.5)
    assert ranking([Costed("bad", 1.0, 1.0, False)]) == (0, None, None, None, None)


def test_the_exponent_of_a_power_is_exact_and_of_scatter_is_uncertain() -> None:
    sizes = [1.0, 2.0, 4.0]
    exact = exponent(sizes, [3 * size**1.5 for size in sizes])
    assert (exact.value, exact.low, exact.high) == pytest.approx((1.5, 1.5, 1.5))
    rough = exponent(sizes, [1.0, 4.0, 4.0])
    assert rough.value == pytest.approx(1.0)
    # residuals of log2: -1/3, 2/3, -1/3; one degree of freedom
    half = 12.706 * math.sqrt((6 / 9) / 2)
    assert (rough.low, rough.high) == pytest.approx((1 - half, 1 + half))
    assert exponent([1.0, 2.0], [1.0, 2.0]) == Estimate(pytest.approx(1.0))
