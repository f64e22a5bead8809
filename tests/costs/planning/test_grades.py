"""How sure a plan says it is."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from config.load import load
from config.records import PlannedRow
from costs.planning.accuracy import with_errors
from costs.planning.grades import UNCHECKED, checked, grade_of, reasons
from costs.planning.planner import plan
from costs.planning.plans import Plan
from costs.planning.target import Target, find_target
from costs.tables.catalogue import own_price
from tests.conftest import ROOT
from tests.costs.machines import machine
from tests.costs.planning.test_machine import device


def planned(recipe: str, hardware: str | None = None) -> Plan:
    params = load(ROOT / "recipes" / recipe)
    return plan(params, find_target(params, hardware, None, None, Path("nowhere")), params.stages)


def calibrated() -> Plan:
    params = load(ROOT / "recipes" / "demo.yaml")
    target = Target(device(machine()), own_price(0.1, "a test", "2026-11-25"), root=Path("nowhere"))
    return plan(params, target, params.stages)


def test_on_an_accelerator_our_stages_were_never_checked() -> None:
    for stage in planned("gpu-80gb.yaml", "h100-sxm").stages:
        assert stage.time_interval.grade == "C"
        assert stage.time_interval.low <= stage.seconds / 1.5
        assert stage.time_interval.high >= 1.5 * stage.seconds
        if stage.peak_bytes_per_gpu:
            assert stage.memory_interval.grade == "C"
            low, high = stage.memory_interval.low, stage.memory_interval.high
            assert low < stage.peak_bytes_per_gpu < high


def test_time_is_b_on_a_calibrated_cpu_alone_and_memory_on_every_cpu() -> None:
    for result, letter in ((calibrated(), "B"), (planned("demo.yaml"), "C")):
        for stage in (stage for stage in result.stages if stage.stage in ("sft", "ppo", "evaluate")):
            assert (stage.time_interval.grade, stage.memory_interval.grade) == (letter, "B")


def test_runs_of_this_machine_make_it_a() -> None:
    result = calibrated()
    sft = result.stages[1]
    row = PlannedRow.model_validate(
        {
            "time": 1.0, "run_id": "r", "machine": "m", "hardware": sft.hardware, "stage": "sft",
            "phase": "", "planned_seconds": 10.0, "measured_seconds": 12.0,
            "planned_peak_bytes": 16.0, "measured_peak_bytes": 16.0,
        }
    )  # fmt: skip
    stages = with_errors(result, [row, row, row]).stages
    assert stages[1].time_interval.grade == stages[1].memory_interval.grade == "A"
    assert stages[1].time_interval.high == pytest.approx(1.2 * sft.seconds)
    assert stages[2].time_interval == result.stages[2].time_interval


def test_the_run_has_the_sum_of_its_stages_intervals() -> None:
    result = planned("demo.yaml")
    total = result.total
    assert total["seconds_low"] == sum(stage.time_interval.low for stage in result.stages)
    assert total["seconds_low"] < total["seconds"] < total["seconds_high"]


def test_a_kind_of_few_sources_is_c_at_least_by_a_factor_of_two() -> None:
    few = [kind for kind, row in checked().items() if row["sources"] < 3]
    assert few
    for kind in few:
        row = checked()[kind]
        result = grade_of(kind, row["billions"][0], row["generations"][0])
        assert result.letter == "C"
        assert result.low <= 1 / UNCHECKED
        assert result.high >= UNCHECKED


def test_a_larger_model_than_any_checked_is_c() -> None:
    kind = "time of training full"
    largest = checked()[kind]["billions"][1]
    assert grade_of(kind, 4.9 * largest, "ampere").letter == "B"
    far = grade_of(kind, 5.1 * largest, "ampere")
    assert far.letter == "C"
    assert far.why == "a model of 331B, checked from 0.12B to 64.8B"
    assert math.log(far.high) == pytest.approx(2 * math.log(checked()[kind]["high"]))


def test_reasons_are_told_once_with_their_stages() -> None:
    gpu_plan = planned("gpu-80gb.yaml")
    result = reasons(gpu_plan)
    assert result["C: its software was not checked"] == ["sft", "reward", "evaluate"]
    alike = replace(gpu_plan, stages=(gpu_plan.stages[1], gpu_plan.stages[1]))
    assert all(len(stages) == 1 for stages in reasons(alike).values())
