"""Runs in workspaces of their own, which share nothing but a store. 3.6 USD an hour: one second is 0.001 USD."""

import time
from pathlib import Path

import pytest

from config import jsonl
from config.errors import OverBudget
from config.load import load
from config.records import UsageRow
from costs.ledger.budget import Cost, total
from tasks.pipeline.pipeline_run import _leave_for_next
from tasks.planning.prepared import ELSEWHERE, Prepared, prepare
from tasks.run.run import Run, begin_run
from tasks.stage.budget_watcher import BudgetWatch
from tests.support.stage_project import make_project

pytestmark = pytest.mark.integration


def started(folder: Path, name: str, *changes: str) -> tuple[Run, Prepared]:
    """A run in a new workspace, as far as its start."""
    root = make_project(folder / "workspaces" / name, folder / "store", ["sft", "reward"])
    params = load(root / "params.yaml", ["prices.usd_per_device_hour=3.6", *changes])
    prepared = prepare(root, params)
    detail = {"continues": prepared.continues, ELSEWHERE: dict(prepared.spent_elsewhere)}
    return begin_run(root, name, params, detail), prepared


def work(run: Run, seconds: float) -> None:
    row = UsageRow(
        time=time.time(),
        run_id=run.run_id,
        attempt=1,
        step=1,
        phase="train",
        seconds=seconds,
        tokens=1,
        sequences=1,
        peak_bytes=1,
        device="cpu",
        world_size=1,
    )
    jsonl.append(run.root / "runs" / "sft" / "usage.jsonl", row)


def ended(run: Run, state: str) -> None:
    run.record("end", state=state)
    assert _leave_for_next(run) is None


def test_an_empty_workspace_goes_on_with_what_is_left_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workspaces").mkdir()
    monkeypatch.setenv("RLHF_WORKSPACES", str(tmp_path / "workspaces"))
    first, _ = started(tmp_path, "first")
    work(first, 30.0)
    ended(first, "over_budget")
    second, prepared = started(tmp_path, "second", "budget.max_usd=9")
    assert prepared.continues == "first"
    assert total(prepared.spent) == pytest.approx(Cost(0.030, 30.0))
    work(second, 20.0)
    ended(second, "stopped")
    third, prepared = started(tmp_path, "third", "budget.max_usd=0.05", "budget.gate=warn")
    assert total(prepared.spent) == pytest.approx(Cost(0.050, 50.0)), "none of it is counted twice"
    with pytest.raises(OverBudget, match=r"budget\.max_usd=0\.05 leaves no room to start sft: 0\.05 USD"):
        BudgetWatch(third, "sft").refuse_without_room()
    other, prepared = started(tmp_path, "other-results", "seed=9")
    assert (prepared.continues, total(prepared.spent)) == (None, Cost(0.0, 0.0))
    ended(other, "failed")
    ended(third, "completed")
    assert started(tmp_path, "fourth")[1].continues is None
