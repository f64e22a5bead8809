"""Checkpoints of placed stages in the store: kept, gone on from by another node, and removed."""

import time
from pathlib import Path

import pytest

from config import jsonl
from config.records import AttemptRow
from tasks.cluster.checkpoints import CheckpointStore
from tasks.run.store import Store


def checkpoint(root: Path, step: int, fingerprint: str = "f1") -> None:
    """And what a stage keeps beside: the best weights so far."""
    folder = root / "checkpoints" / "sft" / fingerprint
    (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / f"step-{step:08d}" / "weights").write_text(f"of step {step}")
    (folder / "best").mkdir(exist_ok=True)
    (folder / "best" / "weights").write_text(f"best until {step}")
    (folder / "validation.json").write_text(f"{step}")
    (folder / f"step-{step:08d}" / "manifest.json").write_text("{}")


def workspace(root: Path, *fingerprints: str) -> Path:
    """One whose attempts had these fingerprints, oldest first."""
    for number, fingerprint in enumerate(fingerprints, 1):
        row = {"time": time.time(), "run_id": "r", "attempt": number, "pid": 1, "step": 20, "device": "cpu"}
        jsonl.append(
            root / "runs" / "sft" / "attempts.jsonl",
            AttemptRow.model_validate({**row, "fingerprint": fingerprint, "event": "end", "exit_code": 75}),
        )
    return root


def in_store(store: Store) -> list[str]:
    """Checkpoints, as fingerprint/run/step."""
    return [name.removesuffix("/manifest.json") for name in store.names("checkpoints/sft") if "manifest" in name]


def sent_by(root: Path, store: Store, run_id: str, *steps: int) -> CheckpointStore:
    mirror = CheckpointStore(workspace(root), "sft", store, run_id)
    for step in steps:
        checkpoint(root, step)
        mirror.send()
    return mirror


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_another_node_goes_on_from_the_newest_two_of_the_last_attempts(tmp_path: Path, store: Store) -> None:
    sent_by(tmp_path / "first", store, "r1", 20, 40, 60)
    assert in_store(store) == ["f1/r1/step-00000040", "f1/r1/step-00000060"]
    second = workspace(tmp_path / "second", "f1", "f2")
    CheckpointStore(second, "sft", store, "r2").restore()
    restored = second / "checkpoints" / "sft" / "f1"
    assert sorted(path.name for path in restored.iterdir()) == [
        "best", "step-00000040", "step-00000060", "validation.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (restored / "step-00000060").iterdir()) == ["manifest.json", "weights"]
    assert (restored / "step-00000060" / "weights").read_text() == "of step 60"
    assert (restored / "best" / "weights").read_text() == "best until 60"
    assert (restored / "validation.json").read_text() == "60"
    other = workspace(tmp_path / "other", "f2")
    CheckpointStore(other, "sft", store, "r3").restore()
    assert not (other / "checkpoints").exists()


@pytest.mark.parametrize("run_id", ["r1", "r2"])
def test_what_was_downloaded_of_its_own_run_is_not_uploaded_again(
    tmp_path: Path, store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_by(tmp_path / "first", store, "r1", 20, 40)
    second = workspace(tmp_path / "second", "f1")
    mirror = CheckpointStore(second, "sft", store, run_id)
    mirror.restore()
    mirror.send()
    checkpoint(second, 60)
    mirror.send()
    expected = {
        "r1": ["f1/r1/step-00000040", "f1/r1/step-00000060"],
        "r2": ["f1/r1/step-00000020", "f1/r1/step-00000040", "f1/r2/step-00000040", "f1/r2/step-00000060"],
    }
    assert in_store(store) == expected[run_id]


def test_a_checkpoint_waits_for_its_rows_and_a_damaged_one_is_not_complete(tmp_path: Path, store: Store) -> None:
    mirror = CheckpointStore(workspace(tmp_path / "root"), "sft", store, "r1")
    checkpoint(tmp_path / "root", 20)
    mirror.send(lambda: False)
    assert in_store(store) == []
    mirror.send()
    assert in_store(store) == ["f1/r1/step-00000020"]
    store.remove("checkpoints/sft/f1/r1/step-00000020/manifest.json")
    second = workspace(tmp_path / "second", "f1")
    CheckpointStore(second, "sft", store, "r1").restore()
    assert not (second / "checkpoints").exists()


def test_a_stage_that_is_done_leaves_nothing_of_its_own_and_all_of_others(tmp_path: Path, store: Store) -> None:
    sent_by(tmp_path / "first", store, "r1", 20)
    other = tmp_path / "other"
    checkpoint(other, 20, "f9")
    CheckpointStore(workspace(other), "sft", store, "r9").send()
    CheckpointStore(workspace(tmp_path / "driver", "f1"), "sft", store, "r2").remove()
    assert in_store(store) == ["f9/r9/step-00000020"]
