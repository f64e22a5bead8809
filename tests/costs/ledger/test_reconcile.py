"""Plan beside measurement, by hand. Price: 3.6 USD per device hour, so one device second is 0.001 USD."""

import json
import os
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config import jsonl
from config.load import load
from config.records import TimedRow
from config.workspace.timed import TIMED_FILE, read_timed, skipped_note, this_machine
from costs.ledger.ledger import Ledger, PhaseCost, StageCost, read_ledger
from costs.ledger.reconcile import UNKNOWN, Comparison, as_dict, read_plan, reconcile
from costs.ledger.timed import remember
from tests.conftest import ROOT
from tests.costs.ledgers import build_ledger, stage_cost
from tests.support.clock import Clock

PARAMS = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=3.6"])


def plan(gpus: int = 1, price: float = 3.6, **phases: float) -> dict[str, Any]:
    """A plan.json of one stage, sft."""
    listed = [
        {"phase": name, "seconds": seconds, "peak_bytes": 100.0, "usd": seconds * price / 3600}
        for name, seconds in phases.items()
    ]
    seconds = sum(phases.values())
    stage = {"stage": "sft", "gpus": gpus, "seconds": seconds, "peak_bytes_per_gpu": 100.0, "phases": listed}
    return {"stages": [stage], "hardware": "cpu", "usd_per_device_hour": price}


def stopped_then_done(root: Path) -> Ledger:
    """Run a: 4 s of start, 10 s for steps 1 and 2 (checkpoint after 1). Run b: 4 s of start, 15 s for steps 2 to 4."""
    first, second = Clock(root, "a", 1000.0), Clock(root, "b", 1100.0)
    first.pipeline("start")
    first.attempt("sft", 1, "start")
    for phase, step, seconds in (("start", 0, 4.0), ("train", 1, 5.0), ("train", 2, 5.0)):
        first.use("sft", 1, phase, step, seconds)
    first.pipeline("end", state="killed")
    second.pipeline("start")
    second.attempt("sft", 2, "start")
    second.attempt("sft", 2, "resume", 1)
    second.use("sft", 2, "start", 0, 4.0)
    for step in (2, 3, 4):
        second.use("sft", 2, "train", step, 5.0)
    second.use("sft", 2, "evaluate", 4, 1.0)
    second.done("sft", 2, 4)
    second.pipeline("end", state="completed")
    return read_ledger(root, PARAMS)


def test_without_a_plan_or_an_end_there_is_no_error(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    alone = reconcile(None, ledger)
    assert (alone.total.error, alone.stages[0].total.planned_seconds, alone.hardware) == (None, None, "")
    assert alone.stages[0].total.measured_seconds == pytest.approx(25.0)
    stopped = reconcile(plan(train=9.0), read_ledger(tmp_path, PARAMS, "a"))
    assert (stopped.stages[0].total.measured_seconds, stopped.stages[0].total.error) == (None, None)


def test_a_plan_that_cannot_be_read_is_no_plan(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    for text in ("{", "[]", '{"stages": 3}'):
        (tmp_path / "plan.json").write_text(text)
        assert read_plan(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps(plan(train=1.0)))
    assert read_plan(tmp_path) == plan(train=1.0)


# ---------------------------------------------------------------- what stages took


def with_units(planned: dict[str, Any], **units: float) -> dict[str, Any]:
    """A kept plan that says what each phase does."""
    more = {"hardware": "cpu", "units": units, "held": "5 parameters", "levers": {"micro_batch": 8}}
    return planned | {"stages": [more | stage for stage in planned["stages"]]}


def test_what_a_run_made_is_remembered_once_and_outlives_its_rows(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    planned = with_units(plan(start=5.0, train=16.0, save=2.0), start=1.0, train=4000.0)
    assert remember(tmp_path, ledger, planned) == 2
    assert remember(tmp_path, ledger, planned) == 0
    rows = read_timed(tmp_path).rows
    assert {row.phase: (row.units, row.seconds) for row in rows} == {"start": (1, 4), "train": (4000, 20)}
    assert {(row.run_id, row.stage, row.hardware, row.machine, row.held, row.micro_batch) for row in rows} == {
        ("b", "sft", "cpu", this_machine(), "5 parameters", 8)
    }


def test_a_stage_that_was_reused_or_not_planned_is_not_remembered(tmp_path: Path) -> None:
    stopped_then_done(tmp_path)
    third = Clock(tmp_path, "c", 9000.0)
    third.pipeline("start")
    third.pipeline("stage", stage="sft", cached=True, attempt=2)
    cached = read_ledger(tmp_path, PARAMS)
    assert remember(tmp_path, cached, with_units(plan(train=9.0), train=1.0)) == 0
    assert remember(tmp_path, cached, None) == 0
    assert remember(tmp_path, read_ledger(tmp_path, PARAMS, "b"), plan(train=9.0)) == 0  # of an earlier version
    assert reconcile(plan(train=9.0), cached).stages[0].total.measured_seconds == pytest.approx(25.0)


def test_a_row_cut_by_a_crash_is_skipped_and_counted_and_other_machines_are_left_out(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    remember(tmp_path, ledger, with_units(plan(train=16.0), start=1.0, train=9.0))
    path = tmp_path / TIMED_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:40])
    elsewhere = TimedRow.model_validate_json(whole.splitlines()[0]).model_copy(update={"machine": "another"})
    jsonl.append(path, elsewhere)
    kept = read_timed(tmp_path)
    assert (len(kept.rows), kept.skipped) == (2, 1)


@pytest.mark.parametrize(("skipped", "words"), [(0, None), (1, "1 row of "), (2, "2 rows of "), (7, "7 rows of ")])
def test_skipped_rows_are_counted_in_words(skipped: int, words: str | None) -> None:
    said = skipped_note(skipped)
    assert said is None if words is None else said is not None and said.startswith(words)


def test_a_stage_that_has_made_nothing_yet_was_not_measured(tmp_path: Path) -> None:
    stopped_then_done(tmp_path)
    ledger = read_ledger(tmp_path, PARAMS, "a")
    reconciled = reconcile(plan(start=5.0), ledger)
    assert reconciled.stages[0].phases["start"] == Comparison(5.0, None, pytest.approx(0.005), None, 100.0, None)
    assert reconciled.total == UNKNOWN
    assert reconcile(None, ledger).total == UNKNOWN
    phases = as_dict(ledger, reconciled)["stages"][0]["phases"]
    assert [phase["planned_seconds"] for phase in phases] == [5.0, None]


def two_stages(**changes: Any) -> tuple[Ledger, dict[str, Any]]:
    """Two stages of 4 s and 6 s, planned to take 5 s and 9 s on two devices, with other peaks."""

    def stage(name: str, seconds: float, peak: int) -> StageCost:
        result = (PhaseCost("train", seconds, 1, 1, seconds / 1000, peak),)
        return stage_cost(
            name, seconds=seconds, usd=seconds / 1000, peak_bytes=peak, phases=result, useful_phases=result
        )

    stages = (stage("sft", 4.0, 40), stage("reward", 6.0, 30))
    planned = [
        plan(gpus=2, train=seconds)["stages"][0] | {"stage": name, "peak_bytes_per_gpu": peak}
        for name, seconds, peak in (("sft", 5.0, 20.0), ("reward", 9.0, 50.0))
    ]
    return build_ledger(*stages), {"stages": planned, "hardware": "cpu"} | changes


def test_stages_that_are_done_are_remembered_with_their_peaks(tmp_path: Path) -> None:
    ledger, planned = two_stages()
    planned = with_units(planned, train=100.0)
    before = time.time()
    ledger = replace(ledger, stages=(ledger.stages[0], replace(ledger.stages[1], taught_nothing_usd=0.0015)))
    failed = replace(ledger, run_id="q", stages=(replace(ledger.stages[0], state="failed"), ledger.stages[1]))
    assert remember(tmp_path, failed, planned) == 1
    assert remember(tmp_path, ledger, planned) == 2
    rows = read_timed(tmp_path).rows
    assert all(before <= row.time <= time.time() for row in rows)
    assert [(row.run_id, row.stage, row.units, row.seconds, row.peak_bytes) for row in rows] == [
        ("q", "reward", 100.0, 6.0, 30.0),
        ("r", "sft", 100.0, 4.0, 40.0),
        ("r", "reward", 100.0, 6.0, 30.0),
    ]
    assert [row.taught_nothing for row in rows] == [0.25, 0.0, 0.25]
    idle = replace(ledger.stages[0], useful_phases=(replace(ledger.stages[0].useful_phases[0], seconds=0.0),))
    assert remember(tmp_path, replace(ledger, run_id="s", stages=(idle, ledger.stages[1])), planned) == 1


def test_the_machine_is_its_processor_and_its_cores() -> None:
    said = this_machine()
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    name = model[0] if model else platform.processor() or platform.machine()
    assert said == f"{name}, {os.cpu_count()} cores"


def test_a_note_of_skipped_rows_says_what_to_do() -> None:
    assert skipped_note(2) == (
        f"2 rows of {TIMED_FILE} cut by a crash or not understood: plans do without them. "
        "Delete them from the file to lose this line."
    )


def test_what_a_stage_took_is_remembered_of_the_device_that_it_was_planned_for(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    planned = with_units(plan(start=5.0, train=16.0, save=2.0), train=1.0)
    planned["stages"][0]["hardware"] = "h100-sxm"
    remember(tmp_path, ledger, planned)
    assert {row.hardware for row in read_timed(tmp_path).rows} == {"h100-sxm"}


def test_the_json_has_the_keys_that_the_documentation_has(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    result = as_dict(ledger, reconcile(plan(start=2.0, train=20.0), ledger))
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").split("## Costs as JSON")[1]
    parts = (part.partition(":\n") for part in text.split("Keys of ")[1:])
    written = {name: set(re.findall(r"`(\w+)`", keys)) for name, _, keys in parts}
    both = written["the run, each stage and each phase"]
    (stage,) = result["stages"]
    assert set(result) - {"stages"} | {"usd_per_win_rate_point"} == written["the run"] | both
    assert set(stage) - {"phases", "by_attempt"} == written["each stage"] | both
    assert all(set(phase) == written["each phase"] | both for phase in stage["phases"])
    assert all(set(attempt) == written["each attempt"] for attempt in stage["by_attempt"])


def test_each_attempt_has_its_own_cost(tmp_path: Path) -> None:
    ledger = stopped_then_done(tmp_path)
    (stage,) = ledger.stages
    (attempt,) = stage.by_attempt  # the other belongs to the run before
    assert (attempt.attempt, attempt.state, attempt.resumed_step) == (2, "done", 1)
    assert (attempt.seconds, attempt.usd) == (stage.seconds, pytest.approx(stage.usd))


def test_what_a_judge_is_planned_to_be_paid_is_beside_what_it_was_paid(tmp_path: Path) -> None:
    content = plan(judge=10.0)
    content["stages"][0]["phases"][0]["paid_usd"] = 2.0
    comparison = reconcile(content, stopped_then_done(tmp_path)).stages[0]
    assert comparison.total.planned_usd == pytest.approx(2.010)
    assert comparison.phases["judge"].planned_usd == pytest.approx(2.010)
