import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.load import load
from config.records import AttemptRow, MetricRow, UsageRow
from tasks.stage.progress import Watch, eta_seconds, planned_steps
from tests.conftest import ROOT

PARAMS = load(
    ROOT / "recipes" / "demo.yaml",
    ["sft.epochs=1.5", "sft.batch_size=4", "sft.micro_batch_size=4", "ppo.updates=7"],
)


def test_steps_are_rows_by_batch_times_epochs(tmp_path: Path) -> None:
    path = tmp_path / "data" / "prepared" / "sft" / "train.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}\n" * 10)
    assert (
        planned_steps(tmp_path, PARAMS, "sft") == 5
    )  # ceil(10 / 4) = 3 batches, times 1.5, rounded up
    assert planned_steps(tmp_path, PARAMS, "ppo") == 7
    assert planned_steps(tmp_path, PARAMS, "rloo") == PARAMS.rloo.updates
    assert planned_steps(tmp_path, PARAMS, "reward") is None
    assert planned_steps(tmp_path, PARAMS, "data") is None
    assert (
        planned_steps(
            tmp_path, load(ROOT / "recipes" / "demo.yaml", ["reward.max_steps=9"]), "reward"
        )
        == 9
    )
    limited = ["sft.epochs=1.5", "sft.batch_size=4", "sft.micro_batch_size=4"]
    for max_steps, steps in ((4, 4), (6, 5)):
        assert (
            planned_steps(
                tmp_path,
                load(ROOT / "recipes" / "demo.yaml", [*limited, f"sft.max_steps={max_steps}"]),
                "sft",
            )
            == steps
        )


def test_the_time_left_goes_by_the_pace_between_two_moments() -> None:
    assert eta_seconds(100, (10.0, 20), (16.0, 23)) == pytest.approx(
        154.0
    )  # 2 s a step, 77 steps left
    assert eta_seconds(100, (10.0, 20), (10.0, 20)) is None
    assert eta_seconds(20, (10.0, 10), (12.0, 22)) == 0


@given(done=st.integers(1, 1000), left=st.integers(0, 1000), pace=st.floats(0.001, 100))
def test_at_a_steady_pace_the_time_left_is_steps_left_times_pace(
    done: int, left: int, pace: float
) -> None:
    assert eta_seconds(done + left, (0.0, 0), (done * pace, done)) == pytest.approx(left * pace)


def test_a_watch_sees_only_the_attempt_at_work(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ppo"
    common = {"run_id": "r", "time": time.time()}
    jsonl.append(
        folder / "attempts.jsonl",
        AttemptRow(**common, attempt=1, event="start", fingerprint="", pid=11, step=0),
    )
    jsonl.append(
        folder / "metrics.jsonl", MetricRow(**common, attempt=1, step=5, values={"score": 1.0})
    )
    watch = Watch(tmp_path, PARAMS, "ppo")
    assert (watch.look().step, watch.pid, watch.look().values) == (0, None, {})
    jsonl.append(
        folder / "attempts.jsonl",
        AttemptRow(**common, attempt=2, event="start", fingerprint="", pid=12, step=0),
    )
    jsonl.append(
        folder / "attempts.jsonl",
        AttemptRow(**common, attempt=2, event="resume", fingerprint="", pid=12, step=3),
    )
    assert (watch.look().step, watch.pid) == (3, 12)
    usage = {
        "phase": "update",
        "tokens": 1,
        "sequences": 1,
        "peak_bytes": 1,
        "device": "cpu",
        "world_size": 1,
        "seconds": 1.0,
    }
    for step, at in ((4, 100.0), (5, 103.0)):
        jsonl.append(
            folder / "usage.jsonl", UsageRow(run_id="r", attempt=2, step=step, time=at, **usage)
        )
    jsonl.append(
        folder / "metrics.jsonl", MetricRow(**common, attempt=2, step=5, values={"score": 2.0})
    )
    progress = watch.look()
    assert (progress.step, progress.steps, progress.values) == (5, 7, {"score": 2.0})
    assert progress.eta_seconds == pytest.approx(6.0)
    assert progress.fraction == pytest.approx(5 / 7)
    jsonl.append(
        folder / "attempts.jsonl",
        AttemptRow(**common, attempt=2, event="end", fingerprint="", pid=12, step=7, exit_code=0),
    )
    watch.look()
    assert watch.pid is None
