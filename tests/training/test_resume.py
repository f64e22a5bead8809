"""Every stage after a kill, with checkpoints that were damaged meanwhile, and after it was done but nobody took
note.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import jsonl
from config.errors import CheckpointError, StageStopped
from config.load import write
from config.records import CHANGED_CODE_VARIABLE, UsageRow
from config.stage_code import CODE
from tests.tasks.test_dvc_yaml import PIPELINE as DVC
from tests.training.conftest import PIPELINE
from tests.training.support.processes import attempts
from tests.training.support.tiny import files, names, open_stage, params, run_main, stop_after_a_step, work
from training.process.checkpoint import DONE, MANIFEST, write_manifest
from training.process.run import resolve_changed_code

Project = Callable[..., Path]
TRAINED = ("sft", "reward", "ppo")
IDLE_PHASES = {"start", "other"}


def outputs(stage: str) -> list[str]:
    """A stage's outputs as dvc.yaml lists them: a path, or a path with its options."""
    entry = DVC[stage]
    return [path for out in entry["outs"] for path in ([out] if isinstance(out, str) else out)]


def made_by(root: Path, stage: str) -> dict[str, bytes]:
    """Every output of a stage, as dvc.yaml lists them."""
    paths = [root / path for path in outputs(stage)]
    result = {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}
    return result | {
        str((path / name).relative_to(root)): text
        for path in paths
        if path.is_dir()
        for name, text in files(path).items()
    }


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def interrupted(
    finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], tuple[Path, list[Path]]]:
    """Copies a project whose stage was stopped after three steps; its two checkpoints are given with it, the older
    first.
    """
    result: dict[str, Path] = {}

    def copy(stage_name: str, target: Path) -> tuple[Path, list[Path]]:
        if stage_name not in result:
            root = result[stage_name] = tmp_path_factory.mktemp(stage_name) / "project"
            shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
            for later in PIPELINE[PIPELINE.index(stage_name) :]:
                shutil.rmtree(root / "models" / later, ignore_errors=True)
            for _ in range(3):
                stop_after_a_step(root, stage_name)
        shutil.copytree(result[stage_name], target)
        return target, sorted((target / "checkpoints" / stage_name).glob("*/step-*"))

    return copy


def largest(checkpoint: Path) -> Path:
    """The file with the optimizer, whatever the stage calls it."""
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def empty_a_file(checkpoint: Path) -> None:
    largest(checkpoint).write_bytes(b"")


def cut_a_file(checkpoint: Path) -> None:
    largest(checkpoint).write_bytes(largest(checkpoint).read_bytes()[:1000])


def lose_a_file(checkpoint: Path) -> None:
    largest(checkpoint).unlink()


def write_garbage(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.json"):
        path.write_text('{"step": [', encoding="utf-8")


def lose_everything(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = (empty_a_file, cut_a_file, lose_a_file, write_garbage, lose_everything)
SOME = [
    *(("ppo", hurt) for hurt in DAMAGES),
    ("sft", cut_a_file),
    ("reward", lose_a_file),
    pytest.param("sft", write_garbage, marks=pytest.mark.slow),
    pytest.param("reward", empty_a_file, marks=pytest.mark.slow),
]
"""Those of stages on a Trainer share the code that looks for a checkpoint with ppo."""


@pytest.mark.parametrize(("stage", "hurt"), SOME)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_to_the_same_bits(
    stage: str,
    hurt: Callable[[Path], None],
    interrupted: Callable,
    finished: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, (older, newest) = interrupted(stage, tmp_path / "project")
    hurt(newest)
    with caplog.at_level(logging.WARNING, "training.process.checkpoint"):
        work(root, stage)
    assert [
        (row.levelname, str(newest) in row.getMessage())
        for row in caplog.records
        if row.name == "training.process.checkpoint"
    ] == [("WARNING", True)]
    resumed = [row for row in attempts(root, stage) if row.event == "resume"][-1]
    assert resumed.step == int(older.name.removeprefix("step-")) == 2
    assert made_by(root, stage) == made_by(finished, stage)


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_with_every_checkpoint_damaged_a_stage_begins_anew(
    stage: str, interrupted: Callable, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, checkpoints = interrupted(stage, tmp_path / "project")
    for checkpoint in checkpoints:
        cut_a_file(checkpoint)
    before = len(attempts(root, stage))
    with caplog.at_level(logging.WARNING, "training.process.checkpoint"):
        work(root, stage)
    # each of the two, and that none is left
    assert len([row for row in caplog.records if row.name == "training.process.checkpoint"]) == 3
    assert "resume" not in [row.event for row in attempts(root, stage)[before:]]
    assert made_by(root, stage) == made_by(finished, stage)


@pytest.mark.parametrize("stage", TRAINED)
def test_a_checkpoint_of_another_fingerprint_is_not_picked_up(
    stage: str, interrupted: Callable, tmp_path: Path
) -> None:
    root, _ = interrupted(stage, tmp_path / "project")
    write(params(**{stage: {"updates" if stage == "ppo" else "max_steps": 1}}), root / "params.yaml")
    before = len(attempts(root, stage))
    work(root, stage)
    assert "resume" not in [row.event for row in attempts(root, stage)[before:]]
    # that of the other settings, and what says that this one is done
    assert len(names(root / "checkpoints" / stage)) == 2


@pytest.mark.parametrize("stage", TRAINED)
def test_a_checkpoint_that_another_version_wrote_is_one_clear_line(
    stage: str, interrupted: Callable, tmp_path: Path
) -> None:
    root, (_, newest) = interrupted(stage, tmp_path / "project")
    weights = next(newest.glob("weights/*.safetensors"))
    tensors = load_file(weights)
    save_file({name: torch.zeros(3, 5) for name in tensors}, weights, metadata={"format": "pt"})
    (newest / MANIFEST).unlink()
    write_manifest(newest)
    opened, run = open_stage(root, stage)
    with pytest.raises(CheckpointError, match=f"{newest} is intact but cannot be restored") as said:
        run(opened)
    assert "\n" not in str(said.value)
    assert not (root / "models" / stage).exists()


# ---------------------------------------------------------------- checkpoints of other code


def change_the_code(checkpoints: list[Path]) -> None:
    """As if an earlier training/rl/ppo_math.py had made the checkpoints."""
    for checkpoint in checkpoints:
        before = json.loads((checkpoint / CODE).read_text())
        assert "training/rl/ppo_math.py" in before
        (checkpoint / CODE).write_text(json.dumps(before | {"training/rl/ppo_math.py": "0" * 64}))
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint)


def test_a_checkpoint_of_other_code_is_refused_unless_somebody_says_what_to_do(
    interrupted: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHANGED_CODE_VARIABLE, raising=False)
    root, checkpoints = interrupted("ppo", tmp_path / "project")
    change_the_code(checkpoints)
    assert run_main(root, "ppo") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ppo: ")]
    assert "checkpoint after step 3: training/rl/ppo_math.py changed since" in line
    assert f"{CHANGED_CODE_VARIABLE}=continue to resume from it or restart to start over" in line
    assert not (root / "models/ppo").exists()


@pytest.mark.parametrize(("answer", "resumed"), [("continue", [3]), ("restart", [])])
def test_what_somebody_says_of_a_checkpoint_of_other_code_is_done(
    answer: str,
    resumed: list[int],
    interrupted: Callable,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHANGED_CODE_VARIABLE, answer)
    root, checkpoints = interrupted("ppo", tmp_path / "project")
    change_the_code(checkpoints)
    before = len(attempts(root, "ppo"))
    assert run_main(root, "ppo") == 0
    result = [row for row in attempts(root, "ppo")[before:] if row.event == "resume"]
    assert [row.step for row in result] == resumed
    assert all("training/rl/ppo_math.py" in row.message for row in result)
    # its rows are of more attempts
    assert made_by(root, "ppo") == made_by(finished, "ppo") or answer == "continue"


def test_a_run_that_starts_over_removes_what_other_code_left(
    interrupted: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHANGED_CODE_VARIABLE, "restart")
    root, checkpoints = interrupted("ppo", tmp_path / "project")
    change_the_code(checkpoints)
    stage, run = open_stage(root, "ppo")
    resolve_changed_code(stage)
    stage.stopper.requested = True
    with pytest.raises(StageStopped):
        run(stage)
    assert names(checkpoints[0].parent) == ["step-00000001"]
    assert open_stage(root, "ppo")[0].checkpoints.latest() is not None


# ---------------------------------------------------------------- done, but nobody took note


@pytest.mark.parametrize("stage", PIPELINE)
def test_a_stage_that_is_asked_again_after_it_was_done_computes_nothing(
    stage: str, finished: Path, tmp_path: Path
) -> None:
    root = tmp_path / "project"
    shutil.copytree(finished, root)
    before = {
        path: path.stat().st_mtime_ns for path in (root / "metrics", root / "models") for path in path.rglob("*")
    }
    again = attempts(root, stage)[-1].attempt + 1  # other tests open stages of the shared project
    assert run_main(root, stage) == 0
    assert [(row.attempt, row.event, row.exit_code) for row in attempts(root, stage)][-3:] == [
        (again, "start", None),
        (again, "resume", None),
        (again, "end", 0),
    ]
    usage = [row for row in jsonl.read(root / f"runs/{stage}/usage.jsonl", UsageRow).rows if row.attempt == again]
    assert {row.phase for row in usage} <= IDLE_PHASES
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert made_by(root, stage) == made_by(finished, stage)


@pytest.mark.parametrize("stage", PIPELINE)
def test_what_says_that_a_stage_is_done_names_every_output_of_dvc(stage: str, finished: Path) -> None:
    recorded = json.loads((finished / "checkpoints" / stage / DONE).read_text())["outputs"]
    assert sorted(recorded) == sorted(outputs(stage))


def test_an_output_that_is_gone_or_other_inputs_make_it_work_again(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "project"
    shutil.copytree(finished, root)
    (root / "plots/ppo.csv").unlink()
    assert run_main(root, "ppo") == 0
    assert made_by(root, "ppo") == made_by(finished, "ppo")
    assert "resume" not in [row.event for row in attempts(root, "ppo")]
    write(params(ppo={"updates": 1}), root / "params.yaml")
    assert run_main(root, "ppo") == 0
    assert json.loads((root / "metrics/ppo.json").read_text())["updates"] == 1
