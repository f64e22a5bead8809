import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import jsonl
from config.alive import now
from config.load import load
from config.records import AttemptRow, MetricRow, UsageRow
from tasks.planning.steps import planned_steps
from tasks.run.run import Run
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.progress import Display, Watch, eta_seconds, line
from tests.conftest import ROOT

PARAMS = load(
    ROOT / "recipes" / "demo.yaml", ["sft.epochs=1.5", "sft.batch_size=4", "sft.micro_batch_size=4", "ppo.updates=7"]
)


def test_steps_are_rows_by_batch_times_epochs(tmp_path: Path) -> None:
    path = tmp_path / "data" / "prepared" / "sft" / "train.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}\n" * 10)
    # ceil(10 / 4) = 3 batches, times 1.5, rounded up
    assert planned_steps(tmp_path, PARAMS, "sft") == 5
    assert planned_steps(tmp_path, PARAMS, "ppo") == 7
    assert planned_steps(tmp_path, PARAMS, "rloo") == PARAMS.rloo.updates
    assert planned_steps(tmp_path, PARAMS, "reward") is None
    assert planned_steps(tmp_path, PARAMS, "data") is None
    assert planned_steps(tmp_path, load(ROOT / "recipes" / "demo.yaml", ["reward.max_steps=9"]), "reward") == 9
    limited = ["sft.epochs=1.5", "sft.batch_size=4", "sft.micro_batch_size=4"]
    for max_steps, steps in ((4, 4), (6, 5)):
        assert (
            planned_steps(
                tmp_path, load(ROOT / "recipes" / "demo.yaml", [*limited, f"sft.max_steps={max_steps}"]), "sft"
            )
            == steps
        )


def test_the_time_left_goes_by_the_pace_between_two_moments() -> None:
    # 2 s a step, 77 steps left
    assert eta_seconds(100, (10.0, 20), (16.0, 23)) == pytest.approx(154.0)
    assert eta_seconds(100, (10.0, 20), (10.0, 20)) is None
    assert eta_seconds(20, (10.0, 10), (12.0, 22)) == 0


@given(done=st.integers(1, 1000), left=st.integers(0, 1000), pace=st.floats(0.001, 100))
def test_at_a_steady_pace_the_time_left_is_steps_left_times_pace(done: int, left: int, pace: float) -> None:
    assert eta_seconds(done + left, (0.0, 0), (done * pace, done)) == pytest.approx(left * pace)


def test_the_line_shows_a_value_that_is_not_a_number(tmp_path: Path) -> None:
    watch = Watch(tmp_path, PARAMS, "ppo")
    row = MetricRow(time=1.0, run_id="r", attempt=1, step=1, values={"score": math.nan, "kl": math.inf})
    jsonl.append(tmp_path / "runs" / "ppo" / "metrics.jsonl", row)
    assert line(watch.look()).endswith("score nan, kl inf")


def test_a_watch_sees_only_the_attempt_at_work(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ppo"
    common = {"run_id": "r", "time": time.time()}
    jsonl.append(
        folder / "attempts.jsonl", AttemptRow(**common, attempt=1, event="start", fingerprint="", pid=11, step=0)
    )
    jsonl.append(folder / "metrics.jsonl", MetricRow(**common, attempt=1, step=5, values={"score": 1.0}))
    watch = Watch(tmp_path, PARAMS, "ppo")
    assert (watch.look().step, watch.attempt, watch.look().values) == (0, None, {})
    jsonl.append(
        folder / "attempts.jsonl", AttemptRow(**common, attempt=2, event="start", fingerprint="", pid=12, step=0)
    )
    jsonl.append(
        folder / "attempts.jsonl", AttemptRow(**common, attempt=2, event="resume", fingerprint="", pid=12, step=3)
    )
    assert watch.look().step == 3
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
        jsonl.append(folder / "usage.jsonl", UsageRow(run_id="r", attempt=2, step=step, time=at, **usage))
    jsonl.append(folder / "metrics.jsonl", MetricRow(**common, attempt=2, step=5, values={"score": 2.0}))
    progress = watch.look()
    assert (progress.step, progress.steps, progress.values) == (5, 7, {"score": 2.0})
    assert progress.eta_seconds == pytest.approx(6.0)
    assert progress.fraction == pytest.approx(5 / 7)
    jsonl.append(
        folder / "attempts.jsonl",
        AttemptRow(**common, attempt=2, event="end", fingerprint="", pid=12, step=7, exit_code=0),
    )
    assert watch.look().step == 7


def test_what_waits_in_a_queue_costs_nothing_and_clocks_are_not_compared(tmp_path: Path) -> None:
    """A container whose clock is an hour off, and whose process id is that of some process here."""
    folder = tmp_path / "runs" / "ppo"
    run = Run(tmp_path, "r", load(ROOT / "recipes" / "demo.yaml", ["budget.max_hours=0.01"]))
    watch, budget = Watch(tmp_path, run.params, "ppo"), BudgetWatch(run, "ppo", local=False)
    budget._began_at -= 3600.0  # it was handed over an hour ago
    assert watch.look().usd == pytest.approx(0.0, abs=1e-6)
    assert not budget.look(watch)
    there = time.time() - 3600.0
    start = AttemptRow(run_id="r", time=there, attempt=1, event="start", fingerprint="", pid=1, step=0)
    jsonl.append(folder / "attempts.jsonl", start)
    assert watch.look().seconds < 30.0
    assert not budget.look(watch), "0.01 h are 36 s"
    usage = UsageRow(
        run_id="r",
        attempt=1,
        step=0,
        phase="start",
        time=there + 1.0,
        seconds=41.0,
        tokens=0,
        sequences=0,
        peak_bytes=1,
        device="cpu",
        world_size=1,
    )
    jsonl.append(folder / "usage.jsonl", usage)
    assert watch.look().seconds >= 40.0, "loading before its first word is paid for"
    assert budget.look(watch)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_meanwhile_spends_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    folder, clock = tmp_path / "runs" / "ppo", time.time
    run = Run(tmp_path, "r", load(ROOT / "recipes" / "demo.yaml", ["budget.max_hours=0.01"]))
    watch, budget = Watch(tmp_path, run.params, "ppo"), BudgetWatch(run, "ppo")
    common = {"run_id": "r", "attempt": 1, "pid": os.getpid(), "fingerprint": "", "step": 0}
    jsonl.append(folder / "attempts.jsonl", AttemptRow(event="start", time=clock(), **common))
    watch.look()
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    assert 0.0 < watch.look().seconds < 30.0
    assert not budget.look(watch)
    row = UsageRow(
        **{"run_id": "r", "attempt": 1, "step": 1, "phase": "update", "time": clock()},
        **{"seconds": 1.0, "tokens": 0, "sequences": 0, "peak_bytes": 1, "device": "cpu"},
        world_size=1,
    )
    jsonl.append(folder / "usage.jsonl", row)
    watch.look()
    assert watch.pace.step_ends(now()) == pytest.approx(now(), abs=2.0)


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        display = Display()
        display.say("working")
        os.close(reader)
        display.say("nobody reads this")
        monkeypatch.undo()
        with suppress(OSError):
            terminal.close()
