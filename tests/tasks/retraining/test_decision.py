from typing import Any

import pytest

from config.sections.retraining import Retrain
from config.workspace.retraining import Examination, LengthDrift, Share
from tasks.retraining.decision import decide
from tasks.run.purse import Month

SETTINGS = Retrain(
    min_new_rows=100,
    max_length_drift=0.2,
    max_new_words=0.02,
    max_accuracy_drop=0.05,
    monthly_usd=None,
    max_kl=20.0,
    max_length_ratio=1.5,
    safety_source=None,
    safety_margin=0.05,
)
FREE = Month("2026-11", 3.0, None)


def examination(
    added: int = 0,
    removed: int = 0,
    distance: float = 0.0,
    critical: float = 0.1,
    new_words: tuple[float, float] = (0.0, 0.0),
    accuracy: tuple[float, float] | None = None,
) -> Examination:
    return Examination(
        added={"preference/train": added, "sft/train": 0},
        removed={"preference/train": removed, "prompts/test": 0},
        refused=0,
        length_drift=LengthDrift(distance=distance, critical=critical, mean_before=20.0, mean_new=25.0),
        new_words=Share(value=new_words[0], low=new_words[1], high=1.0, of=500),
        accuracy=None if accuracy is None else Share(value=accuracy[0], low=0.0, high=accuracy[1], of=50),
        accuracy_before=0.85,
    )


def test_nothing_new_is_no_reason_to_train() -> None:
    decision = decide(examination(), 0.1, FREE, SETTINGS)
    assert not decision.train
    assert decision.reasons == ("nothing is new since the champion's data",)


@pytest.mark.parametrize(
    ("added", "removed", "train"), [(99, 0, False), (100, 0, True), (0, 100, True), (60, 60, False), (100, 100, True)]
)
def test_enough_rows_added_or_changed_are_a_reason(added: int, removed: int, train: bool) -> None:
    decision = decide(examination(added, removed), 0.1, FREE, SETTINGS)
    assert decision.train is train
    assert decision.reasons[0].startswith(f"{max(added, removed)} rows were added or changed")


def test_ratings_among_the_new_rows_are_named() -> None:
    found = examination(60)
    rated = found.model_copy(update={"added": {**found.added, "ratings/train": 90, "ratings/test": 10}})
    decision = decide(rated, 0.1, FREE, SETTINGS)
    assert decision.train
    assert decision.reasons[0].startswith(
        "160 rows were added or changed since the champion's data, 100 of them ratings"
    )


@pytest.mark.parametrize(("distance", "critical", "train"), [(0.3, 0.1, True), (0.15, 0.1, False), (0.3, 0.4, False)])
def test_drift_of_lengths_counts_where_it_is_large_and_no_chance(
    distance: float, critical: float, train: bool
) -> None:
    assert decide(examination(5, distance=distance, critical=critical), 0.1, FREE, SETTINGS).train is train


@pytest.mark.parametrize(("share", "low", "train"), [(0.1, 0.05, True), (0.1, 0.01, False), (0.01, 0.005, False)])
def test_words_never_seen_count_where_they_are_surely_too_many(share: float, low: float, train: bool) -> None:
    assert decide(examination(5, new_words=(share, low)), 0.1, FREE, SETTINGS).train is train


@pytest.mark.parametrize(("value", "high", "train"), [(0.5, 0.6, True), (0.7, 0.81, False), (0.75, 0.79, True)])
def test_a_reward_model_that_surely_fails_on_the_new_pairs_is_a_reason(value: float, high: float, train: bool) -> None:
    assert decide(examination(5, accuracy=(value, high)), 0.1, FREE, SETTINGS).train is train


def test_all_reasons_are_reported() -> None:
    result = examination(500, distance=0.5, new_words=(0.2, 0.1), accuracy=(0.5, 0.6))
    assert len(decide(result, 0.1, FREE, SETTINGS).reasons) == 4


@pytest.mark.parametrize(("planned", "train"), [(1.9, True), (2.1, False), (None, False)])
def test_the_months_money_decides_whatever_the_data_says(planned: float | None, train: bool) -> None:
    month = Month("2026-11", 3.0, 5.0)
    for forced in (False, True):
        decision = decide(examination(500), planned, month, SETTINGS, forced)
        assert decision.train is train
        assert train or "retrain.monthly_usd=5" in decision.reasons[0]


def test_a_cycle_that_is_asked_for_needs_no_reason_in_the_data() -> None:
    assert decide(examination(), 0.1, FREE, SETTINGS, forced=True) == (True, ("asked for",))


@pytest.mark.parametrize(("spent", "left"), [(3.0, "$7.00 of"), (10.0, "$0 of"), (12.0, "$0 of")])
def test_what_is_left_of_the_month_is_said_and_is_never_negative(spent: float, left: str) -> None:
    decision = decide(examination(200), 8.0, Month("2026-11", spent, 10.0), SETTINGS)
    assert not decision.train
    assert f"$8.00 are planned and {left} retrain.monthly_usd=10" in decision.reasons[0]
    assert f"left in 2026-11 (${spent:.2f} are spent)" in decision.reasons[0]


MOVED = {"distance": 0.5, "new_words": (0.2, 0.1), "accuracy": (0.5, 0.6)}


def test_every_reason_says_its_figures() -> None:
    decision = decide(examination(500, **MOVED), 0.1, FREE, SETTINGS, forced=True)  # type: ignore[arg-type]
    assert decision == (
        True,
        (
            "500 rows were added or changed since the champion's data (100 are a reason)",
            "the prompts' lengths have drifted: 25.0 tokens on average, 20.0 before; distance 0.50, 0.2 is allowed",
            "20.0% of the words in new prompts were never seen, 2.0% are allowed",
            "the champion's reward model agrees with 50.0% of 50 new pairs, 85.0% of its own "
            "held-out ones: more than 5.0% less",
            "asked for",
        ),
    )


def test_what_speaks_against_it_comes_first_and_says_its_figures() -> None:
    reason = "500 rows were added or changed since the champion's data (100 are a reason)"
    month = Month("2026-11", 3.0, 5.0)
    assert decide(examination(500), None, month, SETTINGS) == (
        False,
        ("no plan can be made, so it is not known whether retrain.monthly_usd=5 suffices", reason),
    )
    assert decide(examination(500), 2.5, month, SETTINGS) == (
        False,
        (
            "$2.50 are planned and $2.00 of retrain.monthly_usd=5 are left in 2026-11 ($3.00 are "
            "spent): raise it in params.yaml, or wait for the next month",
            reason,
        ),
    )
    assert decide(examination(500), None, FREE, SETTINGS) == (True, (reason,))
    assert decide(examination(500), 2.0, month, SETTINGS).train


def test_too_few_rows_are_said_with_how_many_would_do() -> None:
    assert decide(examination(99), 0.1, FREE, SETTINGS) == (
        False,
        (
            "99 rows were added or changed since the champion's data, retrain.min_new_rows=100 "
            "are a reason to train; neither drift nor the reward model's accuracy on them is",
        ),
    )


@pytest.mark.parametrize(
    "changes",
    [{"distance": 0.2}, {"distance": 0.3, "critical": 0.3}, {"new_words": (0.1, 0.02)}, {"accuracy": (0.7, 0.8)}],
    ids=str,
)
def test_what_reaches_its_bound_and_does_not_pass_it_is_no_reason(changes: dict[str, Any]) -> None:
    settings = SETTINGS.model_copy(update={"max_accuracy_drop": 0.85 - 0.8})
    assert not decide(examination(5, **changes), 0.1, FREE, settings).train


def test_what_was_not_examined_is_no_reason() -> None:
    result = examination(5, **MOVED)  # type: ignore[arg-type]
    for absent in (
        {"length_drift": None, "new_words": None, "accuracy": None},
        {"length_drift": None, "new_words": None, "accuracy_before": None},
    ):
        assert not decide(result.model_copy(update=absent), 0.1, FREE, SETTINGS).train
