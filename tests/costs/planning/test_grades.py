"""How sure a plan says it is."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from config.load import load
from costs.planning.grades import UNCHECKED, checked, grade_of, reasons
from costs.planning.planner import plan
from costs.planning.plans import Plan
from costs.planning.target import find_target
from tests.conftest import ROOT


def planned(recipe: str, hardware: str | None = None) -> Plan:
    params = load(ROOT / "recipes" / recipe)
    return plan(params, find_target(params, hardware, None, None, Path("nowhere")), params.stages)


def test_on_an_accelerator_our_stages_were_never_checked() -> None:
    for stage in planned("gpu-80gb.yaml", "h100-sxm").stages:
        assert stage.time_interval.basis == "unchecked"
        assert stage.time_interval.low <= stage.seconds / 1.5
        assert stage.time_interval.high >= 1.5 * stage.seconds
        if stage.peak_bytes_per_gpu:
            assert stage.memory_interval.basis == "unchecked"
            low, high = stage.memory_interval.low, stage.memory_interval.high
            assert low < stage.peak_bytes_per_gpu < high


def test_memory_is_by_checked_formulas_on_every_cpu_and_time_is_not() -> None:
    for stage in (stage for stage in planned("demo.yaml").stages if stage.stage in ("sft", "ppo", "evaluate")):
        assert (stage.time_interval.basis, stage.memory_interval.basis) == ("unchecked", "formula")


def test_the_run_has_the_sum_of_its_stages_intervals() -> None:
    result = planned("demo.yaml")
    total = result.total
    assert total["seconds_low"] == sum(stage.time_interval.low for stage in result.stages)
    assert total["seconds_low"] < total["seconds"] < total["seconds_high"]


def test_a_kind_of_few_sources_is_unchecked_at_least_by_a_factor_of_two() -> None:
    few = [kind for kind, row in checked().items() if row["sources"] < 3]
    assert few
    for kind in few:
        row = checked()[kind]
        result = grade_of(kind, row["billions"][0], row["generations"][0])
        assert result.basis == "unchecked"
        assert result.low <= 1 / UNCHECKED
        assert result.high >= UNCHECKED


def test_a_larger_model_than_any_checked_is_unchecked() -> None:
    kind = "time of training full"
    largest = checked()[kind]["billions"][1]
    assert grade_of(kind, 4.9 * largest, "ampere").basis == "formula"
    far = grade_of(kind, 5.1 * largest, "ampere")
    assert far.basis == "unchecked"
    assert far.why == "a model of 331B, checked from 0.12B to 64.8B"
    assert math.log(far.high) == pytest.approx(2 * math.log(checked()[kind]["high"]))


def test_reasons_are_told_once_with_their_stages() -> None:
    gpu_plan = planned("gpu-80gb.yaml")
    result = reasons(gpu_plan)
    assert result["unchecked: its software was not checked"] == ["sft", "reward", "evaluate"]
    alike = replace(gpu_plan, stages=(gpu_plan.stages[1], gpu_plan.stages[1]))
    assert all(len(stages) == 1 for stages in reasons(alike).values())
