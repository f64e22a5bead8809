"""Checkpoints of placed stages in the store: kept, found by a workspace that knows of no attempt,
and removed.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from config import jsonl
from config.load import load, write
from config.records import AttemptRow
from tasks.remote.checkpoints import CheckpointStore, inputs_digest
from tasks.remote.exchange import Exchange
from tests.conftest import ROOT, TINY

LOCK = {
    "inputs": [("data/inputs/model.json", "1" * 32)],
    "data": [
        ("data/prepared", "a" * 32 + ".dir"),
        ("data/tokenizer", "b" * 32 + ".dir"),
        ("metrics/data.json", "c" * 32),
    ],
    "sft": [("models/sft", "d" * 32 + ".dir")],
}

Change = Callable[[Path], None]


def new_workspace(root: Path) -> Path:
    """A folder as a container's, after data and sft were done somewhere."""
    (root / "data" / "inputs").mkdir(parents=True)
    shutil.copyfile(ROOT / "dvc.yaml", root / "dvc.yaml")
    write(load(TINY), root / "params.yaml")
    (root / "data" / "inputs" / "model.json").write_text("{}")
    write_lock(root, LOCK)
    return root


def write_lock(root: Path, made: dict[str, list[tuple[str, str]]]) -> None:
    stages = {
        stage: {"outs": [{"path": path, "md5": md5} for path, md5 in outs]}
        for stage, outs in made.items()
    }
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))


def checkpoint(root: Path, step: int, fingerprint: str = "f1") -> None:
    folder = root / "checkpoints" / "sft" / fingerprint / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(f"of step {step}")
    (folder / "manifest.json").write_text("{}")


def with_params(*changes: str) -> Change:
    return lambda root: write(load(TINY, list(changes)), root / "params.yaml")


def with_output(stage: str, path: str) -> Change:
    return lambda root: write_lock(
        root,
        LOCK | {stage: [(known, "e" * 32 if known == path else md5) for known, md5 in LOCK[stage]]},
    )


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (with_params("prices.watts=9", "reward.epochs=9.0"), True),
        (with_output("sft", "models/sft"), True),
        (with_output("data", "metrics/data.json"), True),
        (with_output("inputs", "data/inputs/model.json"), True),
        (with_params("sft.epochs=9.0"), False),
        (with_params("seed=9"), False),
        (with_output("data", "data/prepared"), False),
        (with_output("data", "data/tokenizer"), False),
        (
            lambda root: (root / "data" / "inputs" / "model.json").write_text(
                '{"base/config.json": "1"}'
            ),
            False,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "",
)
def test_the_digest_is_of_what_the_stage_reads_and_of_nothing_else(
    tmp_path: Path, change: Change, same: bool
) -> None:
    root = new_workspace(tmp_path)
    before = inputs_digest(root, "sft")
    change(root)
    assert (inputs_digest(root, "sft") == before) is same


def test_a_workspace_that_knows_of_no_attempt_finds_the_checkpoint_of_its_own_inputs(
    tmp_path: Path,
) -> None:
    store, first = Exchange(str(tmp_path / "store")), new_workspace(tmp_path / "first")
    mirror = CheckpointStore(first, "sft", store)
    for step in (20, 40, 60):
        checkpoint(first, step)
        mirror.send()
    assert [name for name in store.names() if name.endswith("weights")] == [
        f"checkpoints/sft/f1/step-000000{step}/weights" for step in (40, 60)
    ]
    second = new_workspace(tmp_path / "second")
    CheckpointStore(second, "sft", store).restore()
    assert [path.name for path in (second / "checkpoints" / "sft" / "f1").iterdir()] == [
        "step-00000060"
    ]
    assert (
        second / "checkpoints" / "sft" / "f1" / "step-00000060" / "weights"
    ).read_text() == "of step 60"
    other = new_workspace(tmp_path / "other")
    with_params("seed=9")(other)
    CheckpointStore(other, "sft", store).restore()
    assert not (other / "checkpoints").exists()


def test_what_is_done_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    store, root = Exchange(str(tmp_path / "store")), new_workspace(tmp_path / "root")
    mirror = CheckpointStore(root, "sft", store)
    checkpoint(root, 20)
    mirror.send()
    row = {
        "time": time.time(),
        "run_id": "r",
        "attempt": 1,
        "fingerprint": "f1",
        "pid": 1,
        "step": 20,
        "device": "cpu",
    }
    jsonl.append(
        root / "runs" / "sft" / "attempts.jsonl",
        AttemptRow.model_validate({**row, "event": "end", "exit_code": 0}),
    )
    write_lock(root, LOCK | {"sft": [("models/sft", "9" * 32)]})
    mirror.remove()
    assert store.names() == []
