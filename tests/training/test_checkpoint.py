import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.tiny import ROOT, names
from training.checkpoint import MANIFEST, Checkpoints, damage, fingerprint


def saved(root: Path, steps: list[int], digest: str = "f", keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(root, "ppo", digest, keep)
    for step in steps:
        with checkpoints.saving(step) as folder:
            (folder / "state").write_text(f"after {step}" * 100)
            (folder / "rng").mkdir()
            (folder / "rng" / "0").write_bytes(bytes([step]))
    return checkpoints


def test_the_newest_checkpoint_is_found_with_its_step(tmp_path: Path) -> None:
    found = saved(tmp_path, [9, 10, 100]).latest()
    assert found is not None
    assert found.step == 100
    assert (found.path / "state").read_text() == "after 100" * 100
    assert (found.path / "rng" / "0").read_bytes() == bytes([100])


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


DAMAGES = [truncate, flip_a_bit, lose_a_file, cut_the_manifest, lose_the_manifest]


@pytest.mark.parametrize("hurt", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path, hurt: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    assert damage(checkpoints.folder / "step-00000002") is None
    hurt(checkpoints.folder / "step-00000002")
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    hurt(checkpoints.folder / "step-00000001")
    assert checkpoints.latest() is None


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    flip_a_bit(checkpoints.folder / "step-00000002")
    saved(tmp_path, [2])
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 2


# ---------------------------------------------------------------- atomic

SAVER = """
import os, signal, sys
from pathlib import Path
from training import checkpoint
checkpoints = checkpoint.Checkpoints(Path(sys.argv[1]), "ppo", "f")
moment = sys.argv[2]
if moment == "before the manifest":
    checkpoint.write_manifest = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
if moment == "before the rename":
    Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
if moment == "before old ones go":
    checkpoint.shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
with checkpoints.saving(3) as folder:
    (folder / "state").write_text("after 3")
    if moment == "while writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("moment", "step"), [("while writing", 2), ("before the manifest", 2), ("before the rename", 2), ("before old ones go", 3)]
)
def test_a_kill_while_saving_leaves_whole_checkpoints_only(tmp_path: Path, moment: str, step: int) -> None:
    checkpoints = saved(tmp_path, [1, 2])
    assert subprocess.run([sys.executable, "-c", SAVER, str(tmp_path), moment], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    found = checkpoints.latest()
    assert found is not None
    assert found.step == step
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
