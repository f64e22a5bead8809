import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.retraining.drift import critical_distance, length_distance, unseen_words, words

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def test_the_distance_is_the_largest_gap_between_the_distributions() -> None:
    assert length_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert length_distance([1, 1, 1], [9, 9]) == 1
    # at 2: three quarters of the first, a quarter of the second
    assert length_distance([1, 2, 2, 9], [2, 6, 7, 8]) == 0.5


@given(LENGTHS, LENGTHS)
def test_the_distance_is_symmetric_and_that_of_the_definition(new: list[int], before: list[int]) -> None:
    def share(lengths: list[int], x: int) -> float:
        return sum(length <= x for length in lengths) / len(lengths)

    distance = length_distance(new, before)
    assert distance == pytest.approx(length_distance(before, new))
    assert distance == pytest.approx(max(abs(share(new, x) - share(before, x)) for x in range(51)))


def test_the_critical_distance_is_the_tables() -> None:
    # 1.358 at 5% and 1.628 at 1%, the factors of every table of the two-sample test
    assert critical_distance(50, 50, 0.95) == pytest.approx(1.358 * math.sqrt(100 / 2500), abs=1e-3)
    assert critical_distance(10**6, 100, 0.99) == pytest.approx(1.628 / 10, rel=1e-3)


def test_a_distribution_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        length_distance([], [1])


def test_words_are_counted_once_a_place_and_numbers_are_no_news() -> None:
    assert words("My Lamp, order 4 1 7!") == ["my", "lamp", "order", "0", "0", "0"]
    assert unseen_words(["my drone , order 9", "drone drone"], ["my lamp , order 4"]) == (3, 6)
    assert unseen_words([], ["x"]) == (0, 0)
