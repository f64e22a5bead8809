"""Checkpoints of placed stages in the store: kept, found by a workspace that knows of no attempt, and removed."""

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
from tasks.run.exchange import Exchange
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
    stages = {stage: {"outs": [{"path": path, "md5": md5} for path, md5 in outs]} for stage, outs in made.items()}
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
        root, LOCK | {stage: [(output, "e" * 32 if output == path else md5) for output, md5 in LOCK[stage]]}
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
        (lambda root: (root / "data" / "inputs" / "model.json").write_text('{"base/config.json": "1"}'), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "",
)
def test_the_digest_is_of_what_the_stage_reads_and_of_nothing_else(tmp_path: Path, change: Change, same: bool) -> None:
    root = new_workspace(tmp_path)
    before = inputs_digest(root, "sft")
    change(root)
    assert (inputs_digest(root, "sft") == before) is same


def in_store(store: Exchange) -> list[str]:
    """Checkpoints, as fingerprint/run/step."""
    whole = [name for name in store.names() if name.endswith("manifest.json")]
    return [name.removeprefix("checkpoints/sft/").removesuffix("/manifest.json") for name in whole]


def sent_by(root: Path, store: Exchange, run_id: str, *steps: int) -> CheckpointStore:
    mirror = CheckpointStore(new_workspace(root), "sft", store, run_id)
    for step in steps:
        checkpoint(root, step)
        mirror.send()
    return mirror


@pytest.fixture
def store(tmp_path: Path) -> Exchange:
    return Exchange(str(tmp_path / "store"))


def test_a_workspace_that_knows_of_no_attempt_finds_the_checkpoints_of_its_own_inputs(
    tmp_path: Path, store: Exchange
) -> None:
    sent_by(tmp_path / "first", store, "r1", 20, 40, 60)
    assert in_store(store) == ["f1/r1/step-00000040", "f1/r1/step-00000060"]
    second = new_workspace(tmp_path / "second")
    CheckpointStore(second, "sft", store, "r2").restore()
    restored = second / "checkpoints" / "sft" / "f1"
    assert sorted(path.name for path in restored.iterdir()) == ["step-00000040", "step-00000060"], (
        "the older, should the newer be damaged"
    )
    assert (restored / "step-00000060" / "weights").read_text() == "of step 60"
    other = new_workspace(tmp_path / "other")
    with_params("seed=9")(other)
    CheckpointStore(other, "sft", store, "r3").restore()
    assert not (other / "checkpoints").exists()


@pytest.mark.parametrize("run_id", ["r1", "r2"])
def test_what_was_downloaded_is_not_uploaded_again(
    tmp_path: Path, store: Exchange, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_by(tmp_path / "first", store, "r1", 20, 40)
    second = new_workspace(tmp_path / "second")
    mirror = CheckpointStore(second, "sft", store, run_id)
    mirror.restore()
    uploaded, upload = [], Exchange.upload

    def noted(exchange: Exchange, folder: Path, name: str, last: str) -> None:
        uploaded.append(folder.name)
        upload(exchange, folder, name, last)

    monkeypatch.setattr(Exchange, "upload", noted)
    mirror.send()
    checkpoint(second, 60)
    mirror.send()
    assert uploaded == ["step-00000060"]
    kept = {
        "r1": ["f1/r1/step-00000040", "f1/r1/step-00000060"],
        "r2": ["f1/r1/step-00000020", "f1/r1/step-00000040", "f1/r2/step-00000060"],
    }
    assert in_store(store) == kept[run_id]


def test_two_runs_with_the_same_parameters_do_not_touch_each_others_checkpoints(
    tmp_path: Path, store: Exchange
) -> None:
    first = sent_by(tmp_path / "one", store, "r1", 20)
    other = sent_by(tmp_path / "other", store, "r2", 20, 40)
    assert in_store(store) == ["f1/r1/step-00000020", "f1/r2/step-00000020", "f1/r2/step-00000040"]
    other.remove()
    assert in_store(store) == ["f1/r1/step-00000020"]
    third = new_workspace(tmp_path / "third")
    CheckpointStore(third, "sft", store, "r3").restore()
    assert (third / "checkpoints" / "sft" / "f1" / "step-00000020").is_dir(), (
        "what is left is still found by its inputs"
    )
    first.remove()
    assert not [name for name in store.names() if name.startswith("checkpoints/")]


@pytest.mark.parametrize("at_work", [False, True])
def test_a_checkpoint_that_was_gone_on_from_goes_unless_its_own_run_is_still_at_work(
    tmp_path: Path, store: Exchange, at_work: bool
) -> None:
    sent_by(tmp_path / "first", store, "r1", 20)
    for sign in (
        "sft-1/request.json",
        "sft-1/container.alive",
        "data-1/request.json",
        "data-1/container.alive",
        "data-1/reply.json",
    ):
        store.write(f"exchange/r1/{sign}", b"1")
    second = CheckpointStore(new_workspace(tmp_path / "second"), "sft", store, "r2")
    second.restore()
    store.write("exchange/r1/data-1/container.alive", b"2")
    if at_work:
        store.write("exchange/r1/sft-1/container.alive", b"2")
    second.remove()
    assert in_store(store) == (["f1/r1/step-00000020"] if at_work else [])


def test_what_is_done_leaves_nothing_in_the_store(tmp_path: Path, store: Exchange) -> None:
    mirror = sent_by(tmp_path / "root", store, "r2", 20)
    sent_by(tmp_path / "earlier", store, "r1", 20)
    for attempt, run_id in ((1, "r1"), (2, "r2")):
        row = {
            "time": time.time(),
            "run_id": run_id,
            "attempt": attempt,
            "fingerprint": "f1",
            "pid": 1,
            "step": 20,
            "device": "cpu",
        }
        rows = tmp_path / "root" / "runs" / "sft" / "attempts.jsonl"
        jsonl.append(rows, AttemptRow.model_validate({**row, "event": "end", "exit_code": 0}))
    write_lock(tmp_path / "root", LOCK | {"sft": [("models/sft", "9" * 32)]})
    mirror.remove()
    assert store.names() == []
