"""Devices that wait while a stage uses fewer of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from config.load import load
from costs.planning.idle import idle_device_seconds, idle_note
from costs.planning.planner import plan
from costs.planning.target import target
from costs.tables.catalogue import own_price
from tests.conftest import ROOT


def test_seven_of_eight_devices_wait_while_one_works() -> None:
    assert idle_device_seconds([(1, 100.0), (8, 3600.0), (1, 50.0)]) == 7 * 150
    assert idle_device_seconds([(8, 100.0), (8, 50.0)]) == idle_device_seconds([]) == 0


def test_a_plan_says_what_the_devices_cost_that_wait_for_data_and_evaluation() -> None:
    params = load(ROOT / "recipes" / "node-8gpu.yaml")
    made = plan(params, target(params, None, None, None, Path("nowhere")))
    alone = [stage for stage in made.stages if stage.gpus == 1]
    assert [stage.stage for stage in alone] == ["data", "evaluate"]
    usd = 7 * sum(stage.seconds for stage in alone) / 3600 * 2.95
    (note,) = [line for line in made.assumptions if "rented together" in line]
    assert f"{usd:.4g} USD" in note
    assert "data (1), evaluate (1)" in note


def test_what_runs_in_a_pool_of_its_own_waits_for_nobody() -> None:
    params = load(ROOT / "recipes" / "node-8gpu.yaml", [
        "where.data.pool=small", "where.evaluate.pool=small",
        "prices.device_by_pool={small: l4}", "prices.usd_per_device_hour_by_pool={small: 0.5}",
    ])  # fmt: skip
    made = plan(params, target(params, None, None, None, Path("nowhere")))
    assert not [line for line in made.assumptions if "rented together" in line]
    one, eight = (replace(made.stages[1], gpus=gpus) for gpus in (1, 8))
    assert idle_note([eight, eight], own_price(1.0, "own", "today")) == ()
    assert len(idle_note([one, eight], own_price(1.0, "own", "today"))) == 1


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_one_stage_leaves_nothing_idle(seconds: float) -> None:
    assert idle_device_seconds([(4, seconds)]) == 0
