"""What a comparison of variants says, on numbers that can be checked by hand."""

import pytest

from costs.levers.judgement import (
    Choice,
    Costed,
    Scored,
    choice,
    first_update_at,
    margin,
    pareto,
    ranking,
)


def costed(name: str, planned: float, measured: float, same: bool = True, q: float = 0.9) -> Costed:
    return Costed(name, planned, measured, same, q)


def test_margins() -> None:
    assert (margin("gold"), margin("win_rate")) == (0.02, 0.03)


def test_only_pairs_that_differ_by_more_than_a_third_are_ranked() -> None:
    found = ranking([costed("a", 1, 1), costed("b", 3, 1.29), costed("c", 2, 2)])
    # a-b is a tie; a-c is right; b is measured cheaper than c and planned dearer
    assert (found.right, found.pairs, found.wrong) == (1, 2, (("b", "c"),))
    assert found.share == 0.5
    assert ranking([costed("a", 1, 1)]).share is None


def test_regret_is_what_the_planned_cheapest_costs_above_the_measured_cheapest() -> None:
    variants = [
        costed("baseline", 4, 4),
        costed("planned", 1, 2.2),
        costed("best", 2, 2.0),
        costed("bad", 0.5, 0.5, same=False),
    ]
    found = choice(variants)
    assert found == Choice("planned", pytest.approx(0.1), "best")
    assert choice([costed("bad", 1, 1, same=False)]) is None


def test_the_front_has_what_nothing_beats_in_cost_and_quality() -> None:
    variants = [
        costed("cheap", 1, 1, q=0.5),
        costed("worse", 1, 2, q=0.4),
        costed("good", 1, 3, q=0.9),
        costed("dear", 1, 4, q=0.9),
    ]
    assert pareto(variants) == ["cheap", "good"]


def curve(*means: float, n: int = 200) -> list[Scored]:
    return [Scored(update, mean, 0.1, n) for update, mean in enumerate(means, start=1)]


def test_the_target_is_reached_when_the_lower_bound_of_the_last_responses_is() -> None:
    # windows of two updates (400 responses): standard error 0.1 / 20, 1.645 of them 0.0082
    assert first_update_at(curve(0.5, 0.9, 0.9, 0.9), 0.89, 0.95) == 2
    assert first_update_at(curve(0.5, 0.9, 0.9, 0.9), 0.895, 0.95) is None
    assert first_update_at(curve(0.9, 0.9, n=150), 0.5, 0.95) is None, "fewer than 400 responses"
    assert first_update_at([], 0.5, 0.95) is None


def test_responses_are_of_the_policy_before_their_update() -> None:
    assert first_update_at(curve(0.9, 0.9), 0.5, 0.95) == 1
