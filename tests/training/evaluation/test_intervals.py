import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluation.intervals import wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_the_published_table(successes: int, trials: int, low: float, high: float) -> None:
    # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3, printed to four digits
    interval = wilson(successes, trials)
    assert interval.value == successes / trials
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0.51, 0.999))
def test_the_interval_holds_the_share_and_stays_between_zero_and_one(
    trials: int, share: float, confidence: float
) -> None:
    interval = wilson(share * trials, trials, confidence)
    assert 0 <= interval.low <= interval.value + 1e-12
    assert interval.value - 1e-12 <= interval.high <= 1


def test_more_confidence_or_fewer_trials_widen_the_interval() -> None:
    def width(trials: int, confidence: float) -> float:
        interval = wilson(trials / 2, trials, confidence)
        return interval.high - interval.low

    assert width(100, 0.99) > width(100, 0.95) > width(400, 0.95)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_what_is_no_proportion_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="is not a proportion"):
        wilson(successes, trials)
