"""Timing the stages of a run: which rows they read, how many steps they take, and what is kept."""

import contextlib
from pathlib import Path

import pytest
import yaml

from config.errors import EnvironmentFault
from config.load import load
from config.schema import Params
from config.workspace.machine import MACHINE_FILE, Machine
from config.workspace.timed import read_timed
from costs.planning.planner import plan
from costs.planning.target import find_target
from tasks.calibration import other_load
from tasks.calibration.other_load import check_quiet
from tasks.calibration.stages import calibrate, evenly, shortened
from tasks.run.stop import StopRequest
from tests.conftest import ROOT

DEMO = load(ROOT / "recipes" / "demo.yaml")
TINY = ROOT / "tests" / "e2e" / "tiny.yaml"


def test_rows_of_all_lengths_are_kept_with_the_longest_in_their_order() -> None:
    lines = [b"x" * length for length in (3, 9, 1, 7, 5, 2)]
    assert [lines[i] for i in evenly(lines, 3)] == [b"x" * 9, b"x" * 5, b"x" * 2]
    assert evenly(lines, 100) == [*range(len(lines))]
    assert evenly([], 3) == []


def test_a_short_run_has_the_steps_that_it_is_given_and_no_checkpoint() -> None:
    short = shortened(DEMO, {"sft": 7, "reward": 6, "ppo": 3, "evaluate": 3})
    assert (short.sft.max_steps, short.reward.max_steps, short.ppo.updates) == (7, 6, 3)
    assert short.evaluate.prompts == DEMO.evaluate.batch_size
    assert short.ppo.checkpoint_every_updates > 3
    assert short.ppo.max_kl is None
    assert short.sft.batch_size == DEMO.sft.batch_size


@pytest.mark.integration
def test_the_stages_of_a_run_are_timed_and_planned_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_steps: list[int] = []  # other tests keep this machine busy
    monkeypatch.setattr(other_load, "check_quiet", lambda others, cores, threads: asked_steps.append(threads))
    params: Params = load(TINY)
    (tmp_path / MACHINE_FILE).parent.mkdir()
    said: list[str] = []
    rows = calibrate(tmp_path, params, said.append, StopRequest())
    content = yaml.safe_load((tmp_path / MACHINE_FILE).read_text())
    assert asked_steps == [Machine.model_validate(content).threads]
    assert read_timed(tmp_path).rows == rows
    assert list(dict.fromkeys(row.stage for row in rows)) == list(params.stages)
    assert all(row.seconds > 0 and row.units > 0 for row in rows)
    assert all(0.3 < row.seconds < 60 for row in rows if row.phase == "start")
    assert [line.split("s  ", 1)[1].split(":")[0] for line in said[1:-1]] == list(params.stages)
    kept = sorted(path.name for path in (tmp_path / MACHINE_FILE).parent.iterdir())
    assert kept == ["hardware.yaml", "timed.jsonl"]

    planned = plan(params, find_target(params, None, None, None, tmp_path))
    assert planned.stages[1].hardware == "cpu-calibrated"
    assert {stage.time_interval.basis for stage in planned.stages} == {"measured here"}
    named = {(row.stage, row.phase) for row in rows}
    assert {(stage.stage, phase.phase) for stage in planned.stages for phase in stage.phases} - named <= {
        ("ppo", "save"), ("sft", "save"), ("evaluate", "save"),
    }  # fmt: skip


@pytest.mark.integration
def test_a_stage_that_fails_leaves_the_file_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / MACHINE_FILE).parent.mkdir()
    (tmp_path / MACHINE_FILE).write_text("as it was")
    content = load(TINY).model_dump(mode="json")
    content["data"]["source"] = {"kind": "file", "path": "missing.jsonl", "format": "pairs", "columns": {}}
    params = Params.model_validate(content)
    with pytest.raises(EnvironmentFault, match=r"a short data stage fails .*missing\.jsonl"):
        calibrate(tmp_path, params, lambda line: None, StopRequest())
    assert (tmp_path / MACHINE_FILE).read_text() == "as it was"
    assert len(list((tmp_path / MACHINE_FILE).parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("other_cores", "cores", "threads", "quiet"),
    [(0.1, 2, 2, True), (1.5, 2, 2, False), (1.0, 2, 1, True), (1.5, 2, 1, False), (60.0, 64, 2, True)],
)
def test_a_machine_whose_cores_others_use_is_not_measured(
    other_cores: float, cores: int, threads: int, quiet: bool
) -> None:
    with contextlib.nullcontext() if quiet else pytest.raises(EnvironmentFault, match="the machine is busy"):
        check_quiet(other_cores, cores, threads)
