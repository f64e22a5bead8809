"""The calibrated machine as a device of the planner."""

from pathlib import Path

import pytest
import yaml

from config.errors import CostError
from config.load import load
from config.workspace.machine import MACHINE_FILE, Machine, bf16_instructions
from costs.planning.machine import device, pace_of, this_machine, timed_stage, unmeasured
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.target import Target, find_target
from costs.tables.catalogue import hardware, own_price
from tests.costs.machines import machine, stage

DEMO = load(Path("recipes/demo.yaml"))


def written(root: Path) -> Path:
    path = root / MACHINE_FILE
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(machine().model_dump(mode="json")))
    return path


def planned(own: Machine, name: str) -> StagePlan:
    target = Target(device(own), own_price(0.1, "a test", "2026-11-23"), root=Path("nowhere"))
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


def test_an_accelerator_has_its_own_peaks_and_the_paces_of_its_stages() -> None:
    rates = {"fp32": 5e13, "bf16": 7e14}
    result = device(machine(name="NVIDIA H100 80GB HBM3", flops_per_second=rates))
    assert not result.is_cpu
    assert result.peak("bf16") == pytest.approx(7e14)
    assert result.timed == machine().stages


def test_a_plan_that_names_no_device_is_for_the_calibrated_machine(tmp_path: Path) -> None:
    before = find_target(DEMO, None, 1, None, tmp_path).hardware
    written(tmp_path)
    after = find_target(DEMO, None, 1, None, tmp_path).hardware
    assert before.timed == ()
    assert after.timed == machine().stages
    assert find_target(DEMO, "a100-80", 1, None, tmp_path).hardware.name == "a100-80"


def test_a_phase_takes_its_pace_and_a_start_what_it_took_here() -> None:
    here, formulas = machine(), machine(stages=())
    mine, theirs = seconds(planned(here, "ppo")), seconds(planned(formulas, "ppo"))
    assert mine["update"] == pytest.approx(2 * theirs["update"])
    # it was not timed: as the others
    assert mine["reference"] == pytest.approx(2 * theirs["reference"])
    assert theirs["start"] - mine["start"] == pytest.approx(4.0 - 2.5)


def test_memory_beyond_the_formulas_is_added_and_no_part_is_lost() -> None:
    here, formulas = planned(machine(), "ppo"), planned(machine(stages=()), "ppo")
    assert here.peak_bytes_per_gpu - formulas.peak_bytes_per_gpu == pytest.approx(10 * 2**20)
    parts = sum(size for role in here.memory.values() for size in role.values())
    assert parts == pytest.approx(here.peak_bytes_per_gpu)


def test_kin_stand_for_a_stage_that_was_not_timed_and_the_nearest_size_is_taken() -> None:
    small, large = stage("ppo", parameters=1e5), stage("ppo", parameters=1e8)
    result = device(machine(stages=(small, large, stage("sft"))))
    assert timed_stage(result, "rloo", 2e5) == small
    assert timed_stage(result, "ppo", 5e8) == large
    assert timed_stage(result, "dpo", 1.0) == stage("sft")
    assert timed_stage(result, "evaluate", 1.0) is None
    assert pace_of(None, "train") == 1.0


def test_time_is_known_of_the_stages_that_were_timed_with_this_model() -> None:
    other = machine(stages=(stage("ppo", parameters=9e9),))
    mine, theirs = planned(machine(), "ppo"), planned(other, "ppo")
    assert (mine.time_interval.grade, theirs.time_interval.grade) == ("B", "C")


def test_the_data_stage_says_whether_it_was_timed_here() -> None:
    data = stage("data", parameters=1.0, paces={"tokenise": 3.0}, bytes={})
    mine, theirs = (planned(machine(stages=stages), "data") for stages in ((data,), ()))
    assert mine.time_interval.why.startswith("timed here")
    assert theirs.time_interval.why == "measured on another machine"


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
