import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from config.errors import CheckpointError
from tests.support.forked import exit_code_of_fork
from tests.training.support.tiny import names
from training.process import checkpoint
from training.process.checkpoint import DONE, MANIFEST, Checkpoints, damage, fingerprint, restoring


def saved(root: Path, steps: list[int], digest: str = "f", keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(root, "ppo", digest, keep)
    for step in steps:
        with checkpoints.saving(step) as folder:
            (folder / "state").write_text(f"after {step}" * 100)
            (folder / "rng").mkdir()
            (folder / "rng" / "0").write_bytes(bytes([step]))
    return checkpoints


def test_the_newest_checkpoint_is_found_with_its_step(tmp_path: Path) -> None:
    result = saved(tmp_path, [9, 10, 100]).latest()
    assert result is not None
    assert result.step == 100
    assert (result.path / "state").read_text() == "after 100" * 100
    assert (result.path / "rng" / "0").read_bytes() == bytes([100])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [1, 2, 3, 12], keep=3)
    assert names(checkpoints.folder) == ["step-00000002", "step-00000003", "step-00000012"]


def test_there_is_none_at_first_and_none_once_cleared(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "ppo", "f").latest() is None
    checkpoints = saved(tmp_path, [1])
    checkpoints.clear()
    assert checkpoints.latest() is None
    assert not checkpoints.folder.exists()


def test_a_checkpoint_of_other_settings_is_never_used(tmp_path: Path) -> None:
    saved(tmp_path, [1], digest="one")
    assert Checkpoints(tmp_path, "ppo", "other").latest() is None
    assert Checkpoints(tmp_path, "sft", "one").latest() is None
    assert Checkpoints(tmp_path, "ppo", "one").latest() is not None


# ---------------------------------------------------------------- damage


def truncate(folder: Path) -> None:
    (folder / "state").write_bytes((folder / "state").read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "state").read_bytes())
    content[50] ^= 1
    (folder / "state").write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "rng" / "0").unlink()


def cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:20])


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def write_into_the_manifest(content: str) -> Callable[[Path], None]:
    def hurt(folder: Path) -> None:
        (folder / MANIFEST).write_bytes(content.encode("latin-1"))

    return hurt


GARBAGE = ("[1, 2]", '{"state": 5}', '{"state": ["x", "y"]}', "null", "\xff\xfe")
DAMAGES = [
    truncate,
    flip_a_bit,
    lose_a_file,
    cut_the_manifest,
    lose_the_manifest,
    empty_the_manifest,
    *map(write_into_the_manifest, GARBAGE),
]


@pytest.mark.parametrize("hurt", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, hurt: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    assert damage(checkpoints.folder / "step-00000002") is None
    hurt(checkpoints.folder / "step-00000002")
    with caplog.at_level(logging.WARNING):
        result = checkpoints.latest()
    assert result is not None
    assert result.step == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    hurt(checkpoints.folder / "step-00000001")
    assert checkpoints.latest() is None


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    flip_a_bit(checkpoints.folder / "step-00000002")
    saved(tmp_path, [2])
    result = checkpoints.latest()
    assert result is not None
    assert result.step == 2


def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [8, 10])
    flip_a_bit(checkpoints.folder / "step-00000010")
    assert checkpoints.latest() is not None
    with checkpoints.saving(12) as folder:
        (folder / "state").write_text("after 12")
    assert names(checkpoints.folder) == ["step-00000008", "step-00000012"]


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [1])
    shutil.copytree(checkpoints.folder / "step-00000001", checkpoints.folder / "step-00000009.copy")
    (checkpoints.folder / "step-00000002").touch()
    result = checkpoints.latest()
    assert result is not None
    assert result.step == 1
    assert (checkpoints.folder / "step-00000009.copy").exists()


@pytest.mark.parametrize(
    "error", [KeyError("policy.weight"), TypeError("unexpected field"), RuntimeError("size mismatch\n for x")]
)
def test_a_checkpoint_of_another_version_is_one_clear_line(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=r"step-1 is intact but cannot be restored .*to start over") as said,
        restoring(tmp_path / "step-1"),
    ):
        raise error
    assert said.value.exit_code == 2
    assert "\n" not in str(said.value)
    with pytest.raises(torch.OutOfMemoryError), restoring(tmp_path / "step-1"):
        raise torch.OutOfMemoryError


# ---------------------------------------------------------------- done


def done(root: Path, digest: str = "f") -> Checkpoints:
    """Checkpoints of a stage that put a folder and a file in place after step 7."""
    checkpoints = saved(root, [7], digest)
    (root / "model").mkdir()
    (root / "model" / "weights").write_text("w")
    (root / "metrics.json").write_text("{}")
    checkpoints.finish(7, ["model", "metrics.json"])
    return checkpoints


def test_a_finished_stage_is_known_by_its_outputs(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "ppo", "f").finished() is None
    checkpoints = done(tmp_path)
    assert checkpoints.finished() == 7
    assert checkpoints.latest() is None
    assert Checkpoints(tmp_path, "ppo", "other").finished() is None
    assert Checkpoints(tmp_path, "sft", "f").finished() is None


def test_outputs_that_were_touched_are_not_taken_for_done(tmp_path: Path) -> None:
    checkpoints = done(tmp_path)
    (tmp_path / "model" / "weights").write_text("v")
    assert checkpoints.finished() is None
    (tmp_path / "model" / "weights").write_text("w")
    assert checkpoints.finished() == 7
    (tmp_path / "model" / "more").touch()
    assert checkpoints.finished() is None
    (tmp_path / "model" / "more").unlink()
    (tmp_path / "metrics.json").unlink()
    assert checkpoints.finished() is None


def test_what_other_code_made_is_not_taken_for_done(tmp_path: Path) -> None:
    done(tmp_path)
    assert Checkpoints(tmp_path, "ppo", "f").finished() == 7
    assert Checkpoints(tmp_path, "ppo", "f", code={"training/ppo.py": "other"}).finished() is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": "f"}', "null"])
def test_a_damaged_record_is_not_taken_for_done(tmp_path: Path, content: str) -> None:
    checkpoints = done(tmp_path)
    (checkpoints.folder.parent / DONE).write_text(content)
    assert checkpoints.finished() is None


# ---------------------------------------------------------------- atomic


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(root: Path, moment: str) -> None:
    """Save the state after step 3, and be killed at a moment of it."""
    if moment == "before the manifest":
        checkpoint.write_manifest = die  # type: ignore[assignment]
    if moment == "before the rename":
        Path.replace = die  # type: ignore[assignment, method-assign]
    if moment == "before old ones go":
        shutil.rmtree = die  # type: ignore[assignment]
    with Checkpoints(root, "ppo", "f").saving(3) as folder:
        (folder / "state").write_text("after 3")
        if moment == "while writing":
            die()


@pytest.mark.parametrize(
    ("moment", "step"),
    [("while writing", 2), ("before the manifest", 2), ("before the rename", 2), ("before old ones go", 3)],
)
def test_a_kill_while_saving_leaves_whole_checkpoints_only(tmp_path: Path, moment: str, step: int) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    died = exit_code_of_fork(lambda: save_and_die(tmp_path, moment))
    assert died == -signal.SIGKILL
    result = checkpoints.latest()
    assert result is not None
    assert result.step == step
    saved(tmp_path, [3, 4])
    assert names(checkpoints.folder) == ["step-00000003", "step-00000004"]


def test_a_failure_while_saving_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "ppo", "f")
    with pytest.raises(ZeroDivisionError), checkpoints.saving(1):
        1 / 0  # noqa: B018
    assert names(checkpoints.folder) == []


# ---------------------------------------------------------------- fingerprints


def test_the_fingerprint_is_of_parameters_and_contents(tmp_path: Path) -> None:
    for name, content in {"a/x": "1", "a/y": "2", "b": "3"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    inputs = [tmp_path / "a", tmp_path / "b"]

    def now(parameters: dict | None = None, root: Path = tmp_path) -> str:
        return fingerprint(parameters or {"lr": 1.0, "n": 2}, [root / path.name for path in inputs], root)

    first = now()
    assert len(first) == 16
    assert now({"n": 2, "lr": 1.0}) == first
    assert now({"lr": 1.0, "n": 3}) != first
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["cp", "-r", *inputs, tmp_path / "elsewhere"], check=True)
    assert now(root=tmp_path / "elsewhere") == first
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "z")
    renamed = now()
    assert renamed != first
    (tmp_path / "a" / "z").write_text("11")
    assert now() != renamed
