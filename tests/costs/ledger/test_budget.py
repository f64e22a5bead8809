"""Budgets against sums done by hand. Price: 3.6 USD per device hour, so one device second is 0.001 USD."""

import random
import re
from typing import Any

import pytest

from config.load import load
from config.records import PipelineRow, UsageRow
from config.schema import Params
from costs.ledger.attempts import Attempt
from costs.ledger.budget import (
    Cost,
    Pace,
    chain,
    excess,
    limits,
    must_stop,
    predecessor,
    results_key,
    spent,
    time_left,
    total,
)
from costs.tables.price import StagePrice
from tests.conftest import ROOT

PRICE = StagePrice(3.6)


def params(*changes: str) -> Params:
    return load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=3.6", *changes])


def usage(
    step: int,
    phase: str,
    seconds: float,
    time: float = 0.0,
    world_size: int = 1,
    run_id: str = "r1",
    device: str = "cuda",
) -> UsageRow:
    return UsageRow(
        time=time,
        run_id=run_id,
        attempt=1,
        step=step,
        phase=phase,
        seconds=seconds,
        tokens=0,
        sequences=0,
        peak_bytes=0,
        device=device,
        world_size=world_size,
    )


def attempt(run_id: str, *rows: UsageRow) -> Attempt:
    return Attempt(1, run_id, "f", 0, None, "", "cpu", 1, 0.0, 1.0, rows)


def row(run_id: str, event: Any, **values: Any) -> PipelineRow:
    return PipelineRow(time=0.0, run_id=run_id, event=event, **values)


# ---------------------------------------------------------------- which runs share a budget


def test_a_run_goes_on_from_the_newest_unless_that_completed_or_asked_for_something_else() -> None:
    rows = [row("a", "start"), row("a", "end", state="completed"), row("b", "start"), row("b", "end", state="failed")]
    kept = {"b": params()}
    assert (
        predecessor(
            rows, params("budget.max_usd=2", "prices.usd_per_device_hour=1", "tracking.experiment=x"), kept.get
        )
        == "b"
    )
    assert predecessor(rows, params("sft.epochs=9.0"), kept.get) is None
    assert predecessor(rows, params(), {}.get) is None
    assert predecessor(rows[:2], params(), {"a": params()}.get) is None
    assert predecessor([], params(), {}.get) is None


def test_runs_for_other_results_in_between_do_not_reset_the_budget() -> None:
    """a was stopped; b and c asked for something else; d goes on from a, and completes it."""
    kept = {"a": params(), "b": params("seed=9"), "c": params("seed=9"), "d": params(), "e": params()}
    rows = [row("a", "start"), row("a", "end", state="over_budget")]
    rows += [
        row("b", "start"),
        row("b", "end", state="completed"),
        row("c", "start"),
        row("c", "end", state="stopped"),
    ]
    assert predecessor(rows, params(), kept.get) == "a"
    assert predecessor(rows, params("seed=9"), kept.get) == "c"
    rows += [row("d", "start", detail={"continues": "a"}), row("d", "end", state="stopped")]
    assert predecessor(rows, params(), kept.get) == "d"
    rows += [row("e", "start", detail={"continues": "d"}), row("e", "end", state="completed")]
    assert predecessor(rows, params(), kept.get) is None


def test_a_chain_of_runs_is_followed_back_and_ends() -> None:
    rows = [
        row("a", "start"),
        row("b", "start", detail={"continues": "a"}),
        row("c", "start", detail={"continues": "b"}),
        row("d", "start"),
    ]
    assert chain(rows, "c") == ["c", "b", "a"]
    assert chain(rows, "d") == ["d"]
    assert chain(rows, None) == []
    assert chain([row("a", "start", detail={"continues": "a"})], "a") == ["a"]


def test_spent_is_device_time_at_its_price_of_the_runs_asked_for() -> None:
    attempts = [
        attempt("r1", usage(0, "start", 2.0, world_size=4), usage(1, "train", 3.0, world_size=4)),
        attempt("r2", usage(1, "train", 7.0)),
    ]
    assert spent(attempts, ["r1"], PRICE) == pytest.approx((0.020, 5.0))
    assert spent(attempts, ["r1", "r2"], PRICE) == pytest.approx((0.027, 12.0))
    shared = attempt("r3", usage(1, "train", 3.0, world_size=2, device="cpu"))
    assert spent([shared], ["r3"], PRICE) == pytest.approx((0.003, 3.0))  # one CPU for both


# ---------------------------------------------------------------- the gate


def test_a_plan_passes_the_first_limit_that_spent_and_planned_break_together() -> None:
    budget = params("budget.max_usd=1", "budget.max_hours=0.01", "budget.max_usd_by_stage.ppo=0.2").budget
    assert [limit.key for limit in limits(budget)] == [
        "budget.max_usd",
        "budget.max_hours",
        "budget.max_usd_by_stage.ppo",
    ]
    assert excess(budget, {}, {"sft": Cost(0.5, 20.0), "ppo": Cost(0.2, 16.0)}) is None
    result = excess(budget, {"sft": Cost(0.5, 10.0)}, {"ppo": Cost(0.51, 5.0)})
    assert result is not None
    assert (result.limit.key, result.spent, result.planned) == ("budget.max_usd", 0.5, 0.51)
    hours = excess(budget, {"sft": Cost(0.0, 30.0)}, {"ppo": Cost(0.0, 7.2)})
    assert hours is not None
    assert (hours.limit.unit, hours.spent + hours.planned) == ("h", pytest.approx(37.2 / 3600))
    stage = excess(budget, {"ppo": Cost(0.15, 1.0)}, {"ppo": Cost(0.06, 1.0)})
    assert stage is not None
    assert stage.limit.stage == "ppo"


def test_a_run_with_nothing_left_to_do_is_within_any_budget() -> None:
    assert excess(params("budget.max_usd=1").budget, {"sft": Cost(5.0, 1.0)}, {}) is None


# ---------------------------------------------------------------- the watcher


def test_time_left_is_that_of_the_tightest_limit_and_shrinks_with_devices() -> None:
    budget = params("budget.max_usd=0.1", "budget.max_hours=0.025", "budget.max_usd_by_stage.ppo=0.05").budget
    already = {"sft": Cost(0.03, 30.0), "ppo": Cost(0.02, 20.0)}
    tightest = time_left(budget, already, "ppo", 1, PRICE)
    assert tightest is not None
    assert (tightest.limit.key, tightest.seconds) == ("budget.max_usd_by_stage.ppo", pytest.approx(30.0))
    other = time_left(budget, already, "reward", 1, PRICE)
    assert other is not None
    assert (other.limit.key, other.seconds) == ("budget.max_hours", pytest.approx(40.0))
    many = time_left(budget, already, "reward", 4, PRICE)
    assert many is not None
    assert (many.limit.key, many.seconds) == ("budget.max_usd", pytest.approx(12.5))
    assert time_left(params().budget, already, "ppo", 1, PRICE) is None


def test_a_step_is_the_sum_of_its_phases_and_checkpoints_are_apart() -> None:
    pace = Pace()
    pace.add(usage(0, "start", 30.0), received_at=30.0)
    assert pace.step_seconds is None
    for phase, seconds, time in (("rollout", 2.0, 32.0), ("update", 3.0, 35.0), ("save", 0.5, 35.5)):
        pace.add(usage(1, phase, seconds), received_at=time)
    assert (pace.step_seconds, pace.save_seconds) == (5.0, 0.5)
    pace.add(usage(2, "rollout", 2.0), received_at=37.5)
    assert pace.step_seconds == 5.0
    assert pace.step_ends(38.0) == pytest.approx(40.5)
    assert pace.step_ends(40.6) == pytest.approx(45.5)


def test_a_slow_step_long_ago_is_forgotten() -> None:
    pace = Pace()
    for step, seconds in enumerate((90.0, 1.0, 1.0, 1.0, 1.0, 1.0), start=1):
        pace.add(usage(step, "train", seconds), received_at=90.0 + step)
    assert pace.step_seconds == 1.0


def test_before_there_is_a_pace_the_stage_stops_at_the_deadline() -> None:
    assert not must_stop(Pace(), 99.0, 100.0)
    assert must_stop(Pace(), 100.0, 100.0)


@pytest.mark.parametrize("seed", range(40))
def test_a_steady_stage_ends_within_its_last_step_that_fits(seed: int) -> None:
    """A stage of equal steps, watched every `poll` seconds, saves and ends after the step in which it is asked to."""
    rng = random.Random(seed)
    step, save, poll, phases = (rng.uniform(0.05, 20), rng.uniform(0, 5), rng.uniform(0.05, 0.3), rng.randint(1, 6))
    deadline = save + (step + poll) * rng.uniform(4, 40)
    pace = Pace()
    pace.save_seconds = save
    now, rows = 0.0, 0
    while not (rows >= phases and must_stop(pace, now, deadline)):
        now += poll
        assert now <= deadline
        while (rows + 1) / phases * step <= now:
            rows += 1
            pace.add(
                usage((rows - 1) // phases + 1, f"phase{(rows - 1) % phases}", step / phases),
                received_at=rows / phases * step,
            )
    end = (int(now / step) + 1) * step + save
    assert deadline - step - poll <= end <= deadline + poll


def test_costs_add_up_over_stages() -> None:
    costs = {"sft": Cost(1.0, 10.0), "ppo": Cost(2.0, 20.0)}
    assert total(costs) == (3.0, 30.0)
    assert total(costs, "ppo") == (2.0, 20.0)
    assert total(costs, "reward") == (0.0, 0.0)


def test_the_key_of_results_changes_with_what_they_depend_on_and_with_nothing_else() -> None:
    key = results_key(params())
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert results_key(params("prices.usd_per_device_hour=1.0", "budget.max_usd=5.0")) == key
    assert results_key(params("seed=2")) != key
    turned = Params.model_construct(**dict(reversed(list(params().__dict__.items()))))
    assert results_key(turned) == key, "a file of another order asks for the same"


def test_every_limit_has_its_key_value_unit_and_stage() -> None:
    budget = params(
        "budget.max_usd=1",
        "budget.max_hours=2",
        "budget.max_usd_by_stage={sft: 3, ppo: 4}",
        "budget.max_hours_by_stage={reward: 5}",
    ).budget
    assert limits(budget) == [
        ("budget.max_usd", 1, "USD", None),
        ("budget.max_hours", 2, "h", None),
        ("budget.max_usd_by_stage.sft", 3, "USD", "sft"),
        ("budget.max_usd_by_stage.ppo", 4, "USD", "ppo"),
        ("budget.max_hours_by_stage.reward", 5, "h", "reward"),
    ]
    usd, hours = limits(budget)[:2]
    assert (usd.amount(Cost(7.0, 1800.0)), hours.amount(Cost(7.0, 1800.0))) == (7.0, 0.5)
    assert limits(params().budget) == []


@pytest.mark.parametrize(
    ("spent_usd", "planned_usd", "broken"),
    [(0.5, 0.5, False), (0.5, 0.51, True), (2.0, 0.0, False), (2.0, 0.01, True)],
)
def test_a_limit_may_be_reached_and_not_passed(spent_usd: float, planned_usd: float, broken: bool) -> None:
    budget = params("budget.max_usd=1").budget
    result = excess(budget, {"sft": Cost(spent_usd, 1.0)}, {"ppo": Cost(planned_usd, 1.0)})
    assert (result is not None) is broken


def test_a_limit_of_one_stage_looks_at_that_stage() -> None:
    budget = params("budget.max_hours_by_stage.ppo=1").budget
    hour = Cost(9.0, 3600.0)
    assert excess(budget, {"sft": hour}, {"sft": hour, "ppo": hour}) is None
    result = excess(budget, {"ppo": Cost(0.0, 360.0)}, {"ppo": hour})
    assert result == (("budget.max_hours_by_stage.ppo", 1, "h", "ppo"), 0.1, 1.0)


@pytest.mark.parametrize(
    ("changes", "stage", "world_size", "key", "seconds"),
    [
        (("budget.max_usd=1",), "ppo", 1, "max_usd", 980.0),
        (("budget.max_usd=1",), "ppo", 2, "max_usd", 490.0),
        (("budget.max_hours=1",), "ppo", 2, "max_hours", 3570.0),
        (("budget.max_usd_by_stage.ppo=1",), "ppo", 2, "max_usd_by_stage.ppo", 495.0),
        (("budget.max_hours_by_stage.ppo=1",), "ppo", 2, "max_hours_by_stage.ppo", 3580.0),
    ],
)
def test_time_left_of_each_limit(
    changes: tuple[str, ...], stage: str, world_size: int, key: str, seconds: float
) -> None:
    already = {"sft": Cost(0.01, 10.0), "ppo": Cost(0.01, 20.0)}
    result = time_left(params(*changes).budget, already, stage, world_size, PRICE)
    assert result is not None
    assert (result.limit.key, result.seconds) == (f"budget.{key}", pytest.approx(seconds))
    other = time_left(params(*changes).budget, already, "reward", world_size, PRICE)
    assert (other is None) is (result.limit.stage == "ppo")


def test_the_same_results_in_the_schemas_own_types_have_one_key() -> None:
    assert results_key(params()) != results_key(params("align.method=dpo"))
    assert results_key(params("tracking.experiment=other")) == results_key(params())


def test_a_start_is_no_step_and_nothing_before_the_first_one_is() -> None:
    pace = Pace()
    pace.add(usage(3, "start", 30.0), received_at=30.0)
    pace.add(usage(3, "other", 30.0), received_at=60.0)
    pace.add(usage(0, "read", 30.0), received_at=90.0)
    assert (pace.step_seconds, pace.step_ends(1.0)) == (None, None)
    pace.add(usage(1, "train", 2.0), received_at=100.0)
    assert (pace.step_seconds, pace.step_ends(100.0)) == (2.0, 102.0)


def test_the_longest_checkpoint_counts_and_is_in_no_step() -> None:
    pace = Pace()
    for seconds in (1.0, 3.0, 2.0):
        pace.add(usage(1, "save", seconds), received_at=10.0)
    assert (pace.save_seconds, pace.step_seconds) == (3.0, None)


def test_a_step_begins_with_its_first_row_and_ends_a_whole_number_of_steps_later() -> None:
    pace = Pace()
    pace.add(usage(1, "rollout", 2.0), received_at=10.0)
    pace.add(usage(1, "update", 2.0), received_at=14.0)
    assert pace.step_seconds == 4.0
    # begun at 8: the ends are 12, 16, 20
    for now, ends in ((7.0, 12.0), (8.0, 12.0), (11.9, 12.0), (12.0, 16.0), (17.0, 20.0)):
        assert pace.step_ends(now) == ends
    pace.add(usage(2, "rollout", 1.0), received_at=21.0)
    assert pace.step_ends(21.0) == 24.0
    pace.add(usage(1, "update", 1.0), received_at=22.0)  # of a step that is not the newest
    assert (pace.step_seconds, pace.step_ends(21.0)) == (5.0, 25.0)


def test_the_last_five_steps_are_remembered() -> None:
    pace = Pace()
    for step, seconds in enumerate((9.0, 8.0, 1.0, 1.0, 1.0, 1.0), start=1):
        pace.add(usage(step, "train", seconds), received_at=10.0 * step)
    assert pace.step_seconds == 8.0
    pace.add(usage(7, "train", 1.0), received_at=70.0)
    assert pace.step_seconds == 1.0


@pytest.mark.parametrize(("deadline", "stops"), [(22.5, True), (21.0, True), (23.0, False), (24.0, False)])
def test_a_stage_stops_where_one_more_step_and_its_checkpoint_would_not_fit(deadline: float, stops: bool) -> None:
    pace = Pace()
    pace.add(usage(1, "train", 5.0), received_at=10.0)
    pace.add(usage(1, "save", 3.0), received_at=13.0)
    # the current step ends at 15, one more at 20, and its checkpoint at 23
    assert must_stop(pace, 13.0, deadline) is stops


def test_without_a_pace_a_checkpoint_has_to_fit() -> None:
    pace = Pace()
    pace.add(usage(0, "save", 3.0), received_at=3.0)
    assert not must_stop(pace, 96.9, 100.0)
    assert must_stop(pace, 97.0, 100.0)
