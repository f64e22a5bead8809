"""The calibrated machine as a device of the planner."""

from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import yaml

from config import jsonl
from config.errors import CostError
from config.load import load
from config.records import TimedRow
from config.workspace.machine import MACHINE_FILE, bf16_instructions
from config.workspace.timed import TIMED_FILE
from costs.formulas.setting import Setting
from costs.planning.machine import deviation, device, stage_timings, this_machine, timed_seconds, unmeasured
from costs.planning.phases import units_of
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.settings import settings
from costs.planning.target import Target, find_target
from costs.tables.catalogue import Hardware, hardware, own_price
from tests.conftest import ROOT
from tests.costs.machines import machine, timed

DEMO = load(Path("recipes/demo.yaml"))


def written(root: Path) -> Path:
    path = root / MACHINE_FILE
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(machine().model_dump(mode="json")))
    return path


def on(*rows: TimedRow) -> Hardware:
    """The calibrated machine, where these were timed."""
    return replace(device(machine()), timed=rows)


def setting(stage: str, hardware: Hardware) -> Setting:
    target = Target(hardware, own_price(0.1, "a test", "2026-11-23"), root=Path("nowhere"))
    return settings(DEMO, target)[stage]


def planned(name: str, *rows: TimedRow) -> StagePlan:
    target = Target(on(*rows), own_price(0.1, "a test", "2026-11-23"), root=Path("nowhere"))
    return plan(DEMO, target, (name,)).stages[0]


def seconds(made: StagePlan) -> dict[str, float]:
    return {phase.phase: phase.seconds for phase in made.phases}


def test_the_device_is_the_processor_at_its_best_rates() -> None:
    result = device(machine(bytes_per_second=5e9))
    assert result.is_cpu
    assert result.peak("fp32") == pytest.approx(1e11)
    assert result.bandwidth_bytes_per_second == pytest.approx(5e9)
    # a type that was not measured is emulated
    assert result.peak("bf16") < 0.1 * result.peak("fp32")


def test_an_accelerator_has_its_own_peaks() -> None:
    rates = {"fp32": 5e13, "bf16": 7e14}
    result = device(machine(name="NVIDIA H100 80GB HBM3", flops_per_second=rates))
    assert not result.is_cpu
    assert result.peak("bf16") == pytest.approx(7e14)


def test_a_plan_that_names_no_device_is_for_this_machine_and_what_it_timed(tmp_path: Path) -> None:
    assert find_target(DEMO, None, 1, None, tmp_path).hardware.timed == ()
    written(tmp_path)
    own, others = timed("sft", "train"), timed("sft", "train", hardware="h100-sxm")
    for row in (own, others, own.model_copy(update={"machine": "another"})):
        jsonl.append(tmp_path / TIMED_FILE, row)
    here = find_target(DEMO, None, 1, None, tmp_path).hardware
    assert here.name == "cpu-calibrated"
    assert here.timed == (own,)
    assert find_target(DEMO, "h100-sxm", 1, None, tmp_path).hardware.timed == (others,)
    assert find_target(DEMO, "a100-80", 1, None, tmp_path).hardware.timed == ()


def test_a_phase_takes_its_units_times_what_one_took() -> None:
    rows = [timed("ppo", "update"), timed("ppo", "start", units=1.0, seconds=7.0)]
    mine, formulas = seconds(planned("ppo", *rows)), seconds(planned("ppo"))
    assert mine["update"] == pytest.approx(units_of(setting("ppo", on()), "update") / 100)
    assert mine["start"] == 7.0
    # it was not timed
    assert mine["reference"] == formulas["reference"]


def test_units_are_tokens_of_what_a_phase_reads_as_often_as_it_does() -> None:
    sft, ppo = setting("sft", on()), setting("ppo", on())
    assert units_of(sft, "start") == units_of(sft, "save") == 1
    assert units_of(sft, "train") == pytest.approx(sft.workload.steps * 32 * sft.workload.mean_tokens)
    assert units_of(sft, "evaluate") == pytest.approx(sft.workload.held_out * sft.workload.mean_tokens)
    assert units_of(ppo, "rollout") == pytest.approx(24 * 128 * ppo.workload.mean_tokens)
    assert units_of(ppo, "update") == pytest.approx(4 * units_of(ppo, "rollout"))


def test_the_newest_runs_are_taken_by_their_median_and_calibrations_before_there_is_one() -> None:
    def run(number: int, took: float) -> TimedRow:
        return timed("sft", "train", run_id=f"r{number}" if number else "", seconds=took)

    units = {"train": 1000.0}
    calibrated = stage_timings(on(run(0, 99.0)), "sft", timed("sft", "train").held)
    assert timed_seconds(calibrated, units) == {"train": 99.0}
    runs = stage_timings(on(run(0, 99.0), *(run(n, 10.0 * n) for n in range(1, 8))), "sft", timed("sft", "train").held)
    assert timed_seconds(runs, units) == {"train": 50.0}
    assert deviation(calibrated, units) is None
    assert deviation(runs, units) == pytest.approx(stdev(map(log, (30, 40, 50, 60, 70))))


@pytest.mark.parametrize("other", [{"stage": "reward"}, {"held": "5 parameters"}])
def test_another_stage_or_model_does_not_stand_for_it(other: dict[str, Any]) -> None:
    assert planned("sft", timed("sft", "train").model_copy(update=other)) == planned("sft")


@pytest.mark.parametrize("lever", ["sft.activation_checkpointing=true", "sft.optimizer=adamw8bit"])
def test_another_lever_was_not_timed_and_another_number_of_steps_was(lever: str) -> None:
    target = Target(on(timed("sft", "train")), own_price(0.1, "a test", "2026-11-23"), root=Path("nowhere"))
    shorter, other = (
        plan(load(ROOT / "recipes/demo.yaml", [change]), target, ("sft",)).stages[0]
        for change in ("sft.max_steps=100", lever)
    )
    assert seconds(shorter)["train"] == pytest.approx(shorter.units["train"] / 100)
    assert other.time_interval.basis == "unchecked"


def test_memory_is_what_was_measured_at_the_micro_batch_or_on_the_line_through_two() -> None:
    formulas, gib = planned("sft"), 2.0**30
    same = planned("sft", timed("sft", "train"))
    assert same.peak_bytes_per_gpu == pytest.approx(10 * gib)
    parts = sum(size for role in same.memory.values() for size in role.values())
    assert parts == pytest.approx(same.peak_bytes_per_gpu)
    other = timed("sft", "train", micro_batch=16.0, peak_bytes=6 * gib)
    assert planned("sft", other).peak_bytes_per_gpu == formulas.peak_bytes_per_gpu
    two = planned("sft", other, timed("sft", "train", micro_batch=64.0, peak_bytes=18 * gib))
    assert two.peak_bytes_per_gpu == pytest.approx(10 * gib)


def test_an_interval_says_what_it_rests_on() -> None:
    def after(runs: int) -> StagePlan:
        return planned("sft", *(timed("sft", "train", run_id=f"r{n}", seconds=10.0 * 1.1**n) for n in range(runs)))

    assert after(0).time_interval.basis == "unchecked"
    one, three = after(1).time_interval, after(3)
    assert (one.basis, one.why) == ("measured here", "1 run of this machine")
    assert planned("sft", timed("sft", "train")).time_interval.why == "1 calibration of this machine"
    assert three.time_interval.why == "3 runs of this machine"
    # only training was timed
    spread = stdev(map(log, (10, 11, 12.1)))
    assert three.time_interval.high / three.seconds == pytest.approx(exp(2 * spread))
    assert three.memory_interval.basis == "measured here"


def test_a_plan_says_what_the_last_run_paid_for_replies_that_taught_nothing() -> None:
    earlier, last = (timed("ppo", "rollout", run_id=f"r{n}", taught_nothing=0.25 * n) for n in (2, 1))
    said = "ppo: replies that taught nothing were 25% of its cost in the last run here"
    assert said in planned("ppo", earlier, last).assumptions
    assert not any("taught nothing" in line for line in planned("ppo", timed("ppo", "rollout")).assumptions)


def test_the_data_stage_says_whether_it_was_timed_here() -> None:
    row = timed("data", "tokenise", micro_batch=1.0)
    mine, theirs = planned("data", row), planned("data")
    assert mine.time_interval.basis == "measured here"
    assert theirs.time_interval.why == "measured on another machine"
    assert seconds(mine)["tokenise"] == pytest.approx(mine.units["tokenise"] / 100)


@pytest.mark.parametrize(
    ("flags", "instructions"),
    [("avx2 fma", None), ("avx2 avx512_bf16", "avx512_bf16"), ("avx512_bf16 amx_bf16", "amx_bf16")],
)
def test_bf16_is_planned_at_the_rate_of_the_processors_instructions(
    tmp_path: Path, flags: str, instructions: str | None
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {flags}\nbugs : none\n")
    assert bf16_instructions(tmp_path / "cpuinfo") == instructions
    assert bf16_instructions(tmp_path / "none") is None
    result, table = unmeasured(instructions), hardware("cpu")
    faster = result.peak("bf16") / result.peak("fp32")
    assert faster > 1 if instructions else faster < 0.1
    assert result.peak("fp32") == table.peak("fp32")
    assert result.name == table.name


def test_no_file_is_no_machine(tmp_path: Path) -> None:
    assert this_machine(tmp_path) is None


@pytest.mark.parametrize("content", ["name: cpu\n", "[", "products: 3\n", "\x00"])
def test_a_damaged_file_says_to_calibrate_again(tmp_path: Path, content: str) -> None:
    written(tmp_path).write_text(content)
    with pytest.raises(CostError, match="Run rlhf calibrate again, or delete the file"):
        this_machine(tmp_path)
