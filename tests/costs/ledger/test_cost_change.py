"""The shares of a cost difference: they add up, and one changed factor takes all of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs.ledger.cost_change import (
    PRICE,
    SECONDS,
    Work,
    cost_changes,
    reasons,
)
from costs.ledger.ledger import Ledger, PhaseCost, StageCost
from costs.tables.price import usd_of
from tests.costs import books
from tests.costs.books import stage_cost

MIB = 2**20


works = st.builds(Work, st.floats(1e-3, 1e6), st.integers(0, 10**9), st.floats(1e-3, 50))


@given(works, works)
def test_the_shares_add_up_whichever_run_is_named_first(before: Work, after: Work) -> None:
    there, back = reasons(before, after), reasons(after, before)
    scale = max(before.usd, after.usd)
    assert sum(there.values()) == pytest.approx(after.usd - before.usd, abs=1e-9 * scale)
    assert all(
        back[reason] == pytest.approx(-share, abs=1e-9 * scale) for reason, share in there.items()
    )


def test_a_run_for_nothing_differs_by_its_price() -> None:
    assert reasons(Work(3600, 10, 0.0), Work(3600, 10, 2.0)) == {PRICE: 2.0}
    assert reasons(Work(3600, 10, 0.0), Work(7200, 10, 0.0)) == {}


def test_a_phase_without_time_in_one_run_differs_by_its_time() -> None:
    assert reasons(Work(0.0, 0, 2.0), Work(3600, 0, 2.0)) == {SECONDS: 2.0}


def stage(
    name: str, phases: dict[str, tuple[float, int]], price: float, cached: bool = False
) -> StageCost:
    made = tuple(
        PhaseCost(phase, seconds, tokens, 1, usd_of(seconds, price), MIB)
        for phase, (seconds, tokens) in phases.items()
    )
    return stage_cost(
        name,
        cached=cached,
        state="cached" if cached else "done",
        usd_per_device_hour=price,
        peak_bytes=MIB,
        phases=() if cached else made,
        made=made,
    )


def book(price: float, *stages: StageCost) -> Ledger:
    return books.book(*stages, price=price)


def test_two_runs_for_the_same_money_have_no_reasons() -> None:
    assert reasons(Work(0.0, 0, 2.0), Work(0.0, 0, 5.0)) == {}
    assert reasons(Work(3600, 5, 2.0), Work(0.0, 0, 2.0)) == {SECONDS: -2.0}
    assert reasons(Work(3600, 5, 2.0), Work(3600, 5, 0.0)) == {PRICE: -2.0}


def test_tokens_that_one_run_did_not_count_leave_the_time() -> None:
    for tokens in ((5, 0), (0, 5)):
        found = reasons(Work(3600, tokens[0], 2.0), Work(7200, tokens[1], 2.0))
        assert found == {PRICE: 0.0, SECONDS: pytest.approx(2.0)}


def test_without_a_price_the_devices_time_is_that_of_all_processes() -> None:
    free = replace(stage("sft", {"train": (10.0, 5)}, 0.0), world_size=4)
    paid = replace(stage("sft", {"train": (40.0, 5)}, 3600.0), world_size=4)
    change, total = cost_changes(book(0.0, free), book(3600.0, paid))
    assert (change.before, change.after) == (Work(40.0, 5, 0.0), Work(40.0, 5, 3600.0))
    assert change.reasons == total.reasons == {PRICE: 40.0}
    assert (change.stage, change.phase, total.stage, total.phase) == ("sft", "", "", "")
    assert [phase.phase for phase in change.phases] == ["train"]
    assert total.phases == ()


def test_a_stage_that_has_no_outputs_yet_counts_with_what_it_took() -> None:
    whole = stage("sft", {"train": (3600.0, 5)}, 1.0)
    going = replace(whole, made=())
    change, _ = cost_changes(book(1.0, whole), book(1.0, going))
    assert (change.before, change.after) == (Work(3600.0, 5, 1.0), Work(3600.0, 5, 1.0))


def test_runs_without_stages_differ_by_nothing() -> None:
    (total,) = cost_changes(book(1.0), book(1.0))
    assert (total.before, total.after, total.usd, total.reasons) == (None, None, 0.0, {})


def test_stages_that_took_no_time_keep_a_price() -> None:
    idle = book(2.0, stage("sft", {"train": (0.0, 5), "save": (0.0, 2)}, 2.0))
    change, _ = cost_changes(idle, idle)
    assert change.before == Work(0.0, 7, 2.0)
