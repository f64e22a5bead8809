"""Twenty kills at random moments end with the bits of the run that was never killed; and what
counts them counts right.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.crash_resume import Watch, doing, steps_done_again
from config import jsonl
from config.records import AttemptRow, MetricRow, UsageRow
from tests.conftest import ROOT

OLD = {"models/ppo": {"models/ppo/w": b"of old"}, "metrics/ppo.json": {}, "plots/ppo.csv": {}}
NEW = {
    "models/ppo": {"models/ppo/w": b"newer"},
    "metrics/ppo.json": {"metrics/ppo.json": b"{}"},
    "plots/ppo.csv": {"plots/ppo.csv": b"step"},
}


@pytest.mark.slow
@pytest.mark.integration
def test_twenty_kills_across_the_stages_end_with_the_bits_of_the_undisturbed_run() -> None:
    command = [
        sys.executable,
        "benchmarks/crash_resume.py",
        "--kills",
        "20",
        "--seed",
        "3",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["identical"], found["half_written"], done.returncode) == (
        20,
        True,
        [],
        0,
    )
    assert [(row["stage"], row["kills"]) for row in found["stages"]] == [
        ("sft", 5),
        ("reward", 5),
        ("ppo", 5),
        ("distill", 5),
    ]
    assert all(
        row["runs"] == row["identical_runs"] >= 1 and sum(row["doing"].values()) == row["kills"]
        for row in found["stages"]
    )
    assert sum(row["steps_lost"] for row in found["stages"]) > 0
    assert (
        sum(
            row["doing"].get("training", 0) + row["doing"].get("checkpointing", 0)
            for row in found["stages"]
        )
        >= 4
    )


def put(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_an_output_that_is_neither_absent_nor_whole_is_seen(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "ppo", OLD, NEW)
    for whole in (OLD["models/ppo"], NEW["models/ppo"]):
        put(tmp_path, whole)
        watch.look()
        watch.look_closely()
    assert not watch.half_written
    assert watch.replaced() == 1
    put(tmp_path, {"models/ppo/w": b"new"})
    watch.look()
    assert watch.half_written == {"models/ppo"}
    put(tmp_path, {"metrics/ppo.json": b"[]"})  # as long as the whole one
    watch.look()
    assert watch.half_written == {"models/ppo"}
    watch.look_closely()
    assert watch.half_written == {"models/ppo", "metrics/ppo.json"}


def rows(root: Path, attempt: int, resumed: int | None, steps: list[int]) -> None:
    """What an attempt leaves that is killed after the last of `steps`."""
    folder, shared = root / "runs" / "ppo", {"run_id": "manual", "attempt": attempt}
    for event, step in [("start", 0)] + ([("resume", resumed)] if resumed is not None else []):
        row = {
            **shared,
            "time": time.time(),
            "event": event,
            "fingerprint": "f",
            "pid": 1,
            "step": step,
        }
        jsonl.append(folder / "attempts.jsonl", AttemptRow.model_validate(row))
    for step in steps:
        jsonl.append(
            folder / "metrics.jsonl", MetricRow(time=time.time(), step=step, values={}, **shared)
        )
        used = {
            **shared,
            "time": time.time(),
            "step": step,
            "phase": "update",
            "seconds": 1.0,
            "tokens": 1,
            "sequences": 1,
        }
        jsonl.append(
            folder / "usage.jsonl",
            UsageRow.model_validate({**used, "peak_bytes": 1, "device": "cpu", "world_size": 1}),
        )


def test_steps_lost_are_those_beyond_the_checkpoint_that_the_next_attempt_found(
    tmp_path: Path,
) -> None:
    rows(tmp_path, 1, None, [1, 2, 3])
    rows(tmp_path, 2, None, [1, 2, 3, 4, 5])
    rows(tmp_path, 3, 4, [])
    rows(tmp_path, 4, 4, [5, 6])
    assert steps_done_again(tmp_path, "ppo") == 3 + 1


def test_what_a_process_was_doing_is_read_from_what_it_left(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "ppo", OLD, NEW)
    began = time.time() - 1
    assert doing(tmp_path, "ppo", began, watch) == "starting"
    rows(tmp_path, 1, None, [1])
    assert doing(tmp_path, "ppo", began, watch) == "training"
    # the rows are of an attempt before
    assert doing(tmp_path, "ppo", time.time() + 60, watch) == "starting"
    rows(tmp_path, 2, None, [16])
    assert doing(tmp_path, "ppo", began, watch) == "evaluating"
    put(tmp_path, NEW["models/ppo"])
    assert doing(tmp_path, "ppo", began, watch) == "saving"
    (tmp_path / "checkpoints/ppo/f/.step-00000002.new").mkdir(parents=True)
    assert doing(tmp_path, "ppo", began, watch) == "checkpointing"
    # left by an earlier attempt
    os.utime(tmp_path / "checkpoints/ppo/f/.step-00000002.new", (began - 60, began - 60))
    assert doing(tmp_path, "ppo", began, watch) == "saving"
