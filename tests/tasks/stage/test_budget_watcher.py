"""Stages that are real processes, stopped at budgets. Price: 3.6 USD per device hour, so one second is 0.001 USD."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from config import jsonl
from config.errors import OverBudget
from config.load import load
from config.records import AttemptRow, UsageRow
from config.workspace.at_work import locked
from config.workspace.project import STUDIES
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from costs.ledger.budget import Cost, total
from tasks.planning.prepared import spent_by_stage
from tasks.run.purse import PURPOSE
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.stage import budget_watcher
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.outcome import StageCrashed
from tasks.stage.process import POLL_SECONDS
from tasks.stage.progress import Watch, attempts
from tasks.stage.runner import run_stage
from tests.conftest import ROOT

pytestmark = pytest.mark.integration

START_SECONDS = 3.0
"""More than these processes take to start on a busy machine."""
END_SECONDS = 1.5
"""More than they take to notice a stop, write what they have and end on a busy machine."""


def a_run(project: Path, name: str, *changes: str, continues: str | None = None) -> Run:
    params = load(project / "params.yaml", ["prices.usd_per_device_hour=3.6", *changes])
    return begin_run(project, name, params, {"continues": continues} if continues else {})


def bring_up(run: Run, stage: str = "sft") -> None:
    run_stage(run, stage, StopRequest(), lambda _: None)


def spent(run: Run, *run_ids: str) -> Cost:
    return total(spent_by_stage(run.root, run.params, [run.run_id, *run_ids]))


def longest(project: Path, phase: str) -> float:
    """Seconds of the longest row of a phase."""
    return max(
        row.seconds
        for row in jsonl.read(project / "runs" / "sft" / "usage.jsonl", UsageRow).rows
        if row.phase == phase
    )


def events(project: Path) -> list[tuple[int, str, int]]:
    return [(row.attempt, row.event, row.step) for row in attempts(project, "sft")]


def test_devices_that_wait_use_the_budget_up_too(project: Path) -> None:
    alone = a_run(project, "alone", "budget.max_usd=1")
    on_a_cpu = a_run(project, "shared", "budget.max_usd=1", "where.sft.processes=4")
    together = a_run(project, "together", "budget.max_usd=1", "where.sft.processes=4", "prices.device=rtx4090")
    rooms = [BudgetWatch(run, "evaluate").time_left(1) for run in (alone, together, on_a_cpu)]
    assert [room.seconds for room in rooms if room] == pytest.approx([1000.0, 250.0, 1000.0])
    own = BudgetWatch(on_a_cpu, "sft").time_left(4)
    assert own is not None
    assert own.seconds == pytest.approx(1000.0)


@pytest.mark.parametrize(
    "limit",
    [
        "budget.max_usd=0.005",
        pytest.param(f"budget.max_hours={5 / 3600}", marks=pytest.mark.slow),
        pytest.param("budget.max_usd_by_stage.sft=0.005", marks=pytest.mark.slow),
    ],
)
def test_a_stage_stops_within_a_step_of_its_budget_and_goes_on_when_that_is_raised(project: Path, limit: str) -> None:
    (project / "behaviour.txt").write_text("long")
    first = a_run(project, "first", limit)
    with pytest.raises(OverBudget) as over:
        bring_up(first)
    assert limit.split("=")[0] in str(over.value)
    assert attempts(project, "sft")[-1].exit_code == 75
    start, step = longest(project, "start"), longest(project, "train")
    assert 5.0 - step - POLL_SECONDS <= spent(first).seconds
    assert spent(first).seconds <= max(5.0, start + step) + step + POLL_SECONDS + END_SECONDS
    assert not (project / "sft.out").exists()
    (project / "behaviour.txt").unlink()
    stopped_at = attempts(project, "sft")[-1].step
    second = a_run(project, "second", f"{limit.split('=')[0]}=9", continues="first")
    bring_up(second)
    assert (2, "resume", stopped_at) in events(project)
    assert (project / "sft.out").read_text() == "one"


@pytest.mark.slow
def test_a_stage_stopped_at_random_budgets_again_and_again_ends_as_if_it_had_not_been(project: Path) -> None:
    (project / "behaviour.txt").write_text("long")
    rng, runs = random.Random(7), []
    while not (project / "sft.out").exists():
        assert len(runs) < 40, "every run does at least one of the steps"
        allowed = START_SECONDS + rng.uniform(0.5, 2.0)
        before = runs[-1] if runs else None
        budget = (
            total(spent_by_stage(project, before.params, [run.run_id for run in runs])).usd if before else 0.0
        ) + allowed / 1000
        runs.append(
            a_run(project, f"r{len(runs)}", f"budget.max_usd={budget}", continues=before.run_id if before else None)
        )
        with suppress(OverBudget):
            bring_up(runs[-1])
    assert (project / "sft.out").read_text() == "one"
    done = [
        row.step for row in jsonl.read(project / "runs" / "sft" / "usage.jsonl", UsageRow).rows if row.phase == "train"
    ]
    assert done == list(range(1, 41)), "no step was lost, and none done twice"
    assert len(runs) > 1


def test_a_crash_is_paid_for_as_long_as_its_process_lived(project: Path) -> None:
    (project / "behaviour.txt").write_text("killed once")
    run = a_run(project, "crashed", "budget.max_usd=9")
    with pytest.raises(StageCrashed):
        bring_up(run)
    assert events(project)[-1] == (1, "lost", 3)
    rows = jsonl.read(project / "runs" / "sft" / "usage.jsonl", UsageRow).rows
    lost = attempts(project, "sft")[-1]
    assert lost.lived_seconds is not None
    counted = sum(row.seconds for row in rows)
    assert spent(run).seconds == pytest.approx(max(lost.lived_seconds, counted))
    assert lost.lived_seconds > counted - POLL_SECONDS
    # what the crash cost leaves no room to start again
    tight = a_run(project, "again", f"budget.max_usd={spent(run).usd}", continues="crashed")
    with pytest.raises(OverBudget, match="no room to start sft"):
        bring_up(tight)
    assert events(project)[-1] == (1, "lost", 3)
    bring_up(a_run(project, "enough", f"budget.max_usd={spent(run).usd + 1}", continues="crashed"))


def test_a_stage_is_not_started_without_the_time_to_start_it(project: Path) -> None:
    bring_up(a_run(project, "first"))
    start = jsonl.read(project / "runs" / "sft" / "usage.jsonl", UsageRow).rows[0].seconds
    with pytest.raises(OverBudget, match=r"budget\.max_usd_by_stage\.reward=.* leaves no room to start reward"):
        bring_up(a_run(project, "second", f"budget.max_usd_by_stage.reward={0.9 * start / 1000}"), "reward")
    assert attempts(project, "reward") == []


def test_the_time_before_its_first_row_counts_and_that_after_its_last_does_not(project: Path) -> None:
    run = a_run(project, "slow", "budget.max_usd=0.005")
    watch, budget = Watch(project, run.params, "sft"), BudgetWatch(run, "sft")
    assert not budget.look(watch)
    budget._began_at -= 6.0  # imports that last longer than the budget
    end = AttemptRow(time=0.0, run_id="slow", attempt=1, event="end", fingerprint="", pid=1, step=8, exit_code=0)
    ended = Watch(project, run.params, "sft")
    ended.attempt = end
    assert not budget.look(ended)
    assert budget.look(watch)


def test_the_limit_of_another_stage_does_not_bind(project: Path) -> None:
    bring_up(a_run(project, "first", "budget.max_usd_by_stage.ppo=0.0000001"))
    assert (project / "sft.out").exists()


def test_an_unchanged_stage_costs_nothing_whatever_the_budget(project: Path) -> None:
    bring_up(a_run(project, "first"))
    bring_up(a_run(project, "second", "budget.max_usd=0.0000001"))
    assert len([event for event in events(project) if event[1] == "start"]) == 1


def test_the_months_money_stops_a_run_of_a_retrain_cycle_while_it_works(project: Path) -> None:
    (project / "behaviour.txt").write_text("long")
    params = load(project / "params.yaml", ["prices.usd_per_device_hour=3.6", "retrain.monthly_usd=0.105"])
    spent_before = RetrainRow(time=time.time(), cycle="c", event="cost", usd=0.1)
    jsonl.append(project / RETRAIN_ROWS, spent_before)
    cycle = begin_run(project, "cycle", params, {PURPOSE: "a-flow-run"})
    with pytest.raises(OverBudget, match=r"retrain\.monthly_usd=0\.105 is reached"):
        bring_up(cycle)
    assert attempts(project, "sft")[-1].exit_code == 75
    start, step = longest(project, "start"), longest(project, "train")
    assert spent(cycle).seconds <= max(5.0, start + step) + step + POLL_SECONDS + END_SECONDS
    remaining = 0.005 - spent(cycle).usd  # it stopped a step before its limit, and may go on for that
    jsonl.append(project / RETRAIN_ROWS, spent_before.model_copy(update={"cycle": "d", "usd": remaining}))
    with pytest.raises(OverBudget, match=r"retrain\.monthly_usd=0\.105 leaves no room"):
        bring_up(begin_run(project, "next-cycle", params, {PURPOSE: "another"}))
    by_all = {"retrain.monthly_usd": "null", "budget.monthly_usd": f"{spent_before.usd + remaining}"}
    for_every_run = load(
        project / "params.yaml",
        ["prices.usd_per_device_hour=3.6", *(f"{key}={value}" for key, value in by_all.items())],
    )
    with pytest.raises(OverBudget, match=r"budget\.monthly_usd=0\.\d+ leaves no room"):
        bring_up(begin_run(project, "any-run", for_every_run, {}))
    (project / "behaviour.txt").unlink()
    bring_up(begin_run(project, "by-hand", params, {}))
    assert (project / "sft.out").exists()


def test_what_a_judge_is_paid_uses_the_budget_up_while_it_runs(project: Path) -> None:
    run = a_run(project, "judged", "budget.max_usd=1", "budget.monthly_usd=2")
    watch, budget = Watch(project, run.params, "evaluate"), BudgetWatch(run, "evaluate")
    assert budget.usd_left() == 1

    def pay(usd: float) -> bool:
        row = UsageRow(
            time=time.time(), run_id="judged", attempt=1, step=1, phase="judge", seconds=0.0, tokens=1, sequences=0,
            peak_bytes=1, device="cpu", world_size=1, usd=usd,
        )  # fmt: skip
        jsonl.append(project / "runs" / "evaluate" / "usage.jsonl", row)
        watch.look()
        return budget.look(watch)

    start = AttemptRow(
        time=time.time(), run_id="judged", attempt=1, event="start", fingerprint="", pid=1, step=0, device="cpu"
    )
    jsonl.append(project / "runs" / "evaluate" / "attempts.jsonl", start)
    assert not pay(0.5)
    assert pay(0.5)
    assert budget.reached is not None
    assert budget.reached.key == "budget.max_usd"


def test_what_other_workspaces_of_the_project_spend_meanwhile_counts_for_the_month(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_watcher, "ELSEWHERE_EVERY_SECONDS", 0.0)
    run = a_run(project, "here", "budget.monthly_usd=1")
    watch, budget = Watch(project, run.params, "sft"), BudgetWatch(run, "sft")
    study = project / STUDIES / "levers"
    study.mkdir(parents=True)
    shutil.copy(project / "params.yaml", study / "params.yaml")
    other = a_run(study, "there", "budget.monthly_usd=1")
    assert not budget.look(watch)
    row = UsageRow(
        time=time.time(), run_id=other.run_id, attempt=1, step=1, phase="train", seconds=1100.0, tokens=1, sequences=0,
        peak_bytes=1, device="cpu", world_size=1,
    )  # fmt: skip
    jsonl.append(study / "runs" / "sft" / "usage.jsonl", row)
    with locked(study):
        assert budget.look(watch)
    assert budget.reached is not None
    assert budget.reached.key == "budget.monthly_usd"


SUSPENDED = """
import sys
from pathlib import Path
from config.load import load
from tasks.run.run import begin_run
from tasks.run.stop import on_signals
from tasks.stage.runner import run_stage
from tests.conftest import ROOT
run = begin_run(Path.cwd(), "suspended", load(Path("params.yaml")), {})
with on_signals() as stop:
    run_stage(run, "sft", stop, lambda _: None)
"""


def test_a_suspended_run_suspends_its_stage_and_both_go_on(project: Path) -> None:
    (project / "behaviour.txt").write_text("endless")
    command = [sys.executable, "-c", SUSPENDED]
    # in a group of its own: the kernel drops SIGTSTP in a group that no shell of its session waits for
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=project, env=environment, process_group=0) as run:

        def steps() -> int:
            path = project / "runs" / "sft" / "usage.jsonl"
            return len(path.read_text().splitlines()) if path.exists() else 0

        deadline = time.monotonic() + 240  # of a busy machine: nothing here is about speed
        while steps() < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stage = psutil.Process(attempts(project, "sft")[-1].pid)
        run.send_signal(signal.SIGTSTP)
        while stage.status() != psutil.STATUS_STOPPED or psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = steps()
        time.sleep(1.0)
        assert steps() == before
        run.send_signal(signal.SIGCONT)
        while steps() == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.terminate()
        run.wait(240)
    assert attempts(project, "sft")[-1].exit_code == 75
