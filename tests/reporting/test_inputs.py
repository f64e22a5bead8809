"""What the report takes to be a run's own results, and what it does when pieces are missing or broken."""

import json
import math
from pathlib import Path

import pytest

from config import jsonl
from config.errors import CostError
from config.load import load
from config.records import AttemptRow, kept_folder
from config.schema import Params
from config.workspace.kept import file_digest
from reporting.inputs import NO_RUN, finite, read_findings
from tests.reporting.plausible_run import BEGIN, write_cached_run, write_json, write_pipeline_run
from tests.reporting.two_runs import write_two_runs
from tests.support.clock import Clock

FIRST, SECOND = "20261121-120000-a1b2", "20261121-130000-c3d4"


@pytest.fixture
def params() -> Params:
    return load(Path(__file__).parents[2] / "recipes" / "demo.yaml")


def test_a_value_that_is_not_a_number_is_left_out_of_its_curve_and_named(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "manual", BEGIN)
    clock.attempt("sft", 1, "start")
    for step, loss in ((1, 2.0), (2, math.nan), (3, math.inf)):
        clock.log("sft", 1, step, loss=loss, learning_rate=0.1)
    findings = read_findings(tmp_path, params)
    assert findings.curves["sft"] == {"loss": [(1.0, 2.0)], "learning_rate": [(1.0, 0.1), (2.0, 0.1), (3.0, 0.1)]}
    assert findings.notes == [
        "Stage sft logged loss=nan at step 2, and 1 values more are no numbers: the curves leave them out."
    ]


def test_results_of_an_earlier_run_are_not_shown_as_those_of_a_failed_one(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    clock = Clock(tmp_path, SECOND, BEGIN + 3600)
    clock.pipeline("start")
    clock.attempt("data", 2, "start")
    clock.attempt("data", 2, "end", exit_code=2, message="source is empty")
    clock.pipeline("end", state="failed")
    failed = read_findings(tmp_path, params)
    assert all(failed.metrics[stage] == {} for stage in ("data", "reward", "evaluate"))
    assert failed.samples == []
    assert failed.calibration == []
    assert failed.curves["ppo"] == {}
    assert read_findings(tmp_path, params, FIRST).value("evaluate", "gold_aligned") == 0.884


def test_results_replaced_by_a_later_run_come_from_the_copy_the_run_kept(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    clock = Clock(tmp_path, SECOND, BEGIN + 3600)
    clock.pipeline("start")
    clock.attempt("sft", 2, "start")
    clock.done("sft", 2, 1)
    (tmp_path / "metrics/sft.json").write_text('{"eval_loss": 9.0}')
    without = read_findings(tmp_path, params, FIRST)
    assert without.metrics["sft"] == {}
    assert len(without.notes) == 1
    kept = kept_folder(tmp_path, FIRST) / "metrics"
    kept.mkdir(parents=True)
    (kept / "sft.json").write_text('{"eval_loss": 0.5}')
    assert read_findings(tmp_path, params, FIRST).value("sft", "eval_loss") == 0.5
    assert read_findings(tmp_path, params).value("sft", "eval_loss") == 9.0


def test_a_stage_that_was_made_outside_is_read_by_its_digest_or_not_known(tmp_path: Path, params: Params) -> None:
    """Its attempt is not recorded here, and the next run has put other outputs in place."""

    def restored(run_id: str, time: float, loss: float) -> None:
        write_json(tmp_path / "metrics/sft.json", {"eval_loss": loss})
        clock = Clock(tmp_path, run_id, time)
        clock.pipeline("start")
        outs = {"metrics/sft.json": file_digest(tmp_path / "metrics/sft.json")}
        clock.pipeline("stage", stage="sft", cached=True, attempt=None, detail={"outs": outs})
        clock.pipeline("end", state="completed")

    hand = Clock(tmp_path, "manual", BEGIN)
    hand.attempt("sft", 1, "start")
    hand.use("sft", 1, "train", 1, 90.0)
    hand.log("sft", 1, 1, loss=3.0)
    hand.attempt("sft", 1, "end", exit_code=0)
    restored(FIRST, BEGIN + 100, 0.5)
    assert read_findings(tmp_path, params, FIRST).value("sft", "eval_loss") == 0.5
    restored(SECOND, BEGIN + 200, 9.0)
    first, second = read_findings(tmp_path, params, FIRST), read_findings(tmp_path, params, SECOND)
    assert (first.metrics["sft"], second.value("sft", "eval_loss")) == ({}, 9.0)
    assert (len(first.notes), second.notes) == (1, [])
    assert first.curves["sft"] == {}, "whose curve that is nobody knows"
    assert first.ledger.saved_usd == 0.0, "nor what it had cost"
    write_json(kept_folder(tmp_path, FIRST) / "metrics/sft.json", {"eval_loss": 0.5})
    assert read_findings(tmp_path, params, FIRST).value("sft", "eval_loss") == 0.5
    write_json(kept_folder(tmp_path, FIRST) / "metrics/sft.json", {"eval_loss": 0.6})
    assert read_findings(tmp_path, params, FIRST).metrics["sft"] == {}, "a copy that was changed is not the run's"


def test_the_curve_of_a_run_that_failed_ends_with_its_own_attempts(tmp_path: Path, params: Params) -> None:
    for run_id, number, steps in ((FIRST, 1, (1, 2)), (SECOND, 2, (1, 2, 3))):
        clock = Clock(tmp_path, run_id, BEGIN + 1000 * number)
        clock.pipeline("start")
        clock.attempt("sft", number, "start")
        for step in steps:
            clock.log("sft", number, step, loss=float(number))
        clock.attempt("sft", number, "end", exit_code=1)
        clock.pipeline("end", state="failed")
    assert read_findings(tmp_path, params, FIRST).curves["sft"]["loss"] == [(1.0, 1.0), (2.0, 1.0)]


def test_samples_of_an_earlier_run_come_from_its_copy(tmp_path: Path, params: Params) -> None:
    write_two_runs(tmp_path)
    first, second = read_findings(tmp_path, params, FIRST), read_findings(tmp_path, params, SECOND)
    assert (len(first.samples), len(second.samples)) == (3, 2)
    assert (first.value("evaluate", "gold_aligned"), second.value("evaluate", "gold_aligned")) == (0.884, 0.93)


def test_outputs_that_were_restored_belong_to_the_run_that_restored_them(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    other = Clock(tmp_path, "other", BEGIN + 3600)
    other.pipeline("start")
    other.attempt("sft", 2, "start")
    other.done("sft", 2, 1)
    write_cached_run(tmp_path)
    findings = read_findings(tmp_path, params)
    assert findings.value("sft", "eval_loss") == 0.641
    assert findings.curves["sft"]["loss"][-1][0] == 600.0
    assert findings.notes == []


def test_outputs_made_by_hand_after_the_run_are_not_the_runs(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    by_hand = Clock(tmp_path, "manual", BEGIN + 7200)
    by_hand.attempt("reward", 2, "start")
    by_hand.attempt("reward", 2, "end", exit_code=0)
    findings = read_findings(tmp_path, params)
    assert findings.metrics["reward"] == {}
    assert findings.calibration == []
    assert len(findings.curves["reward"]["loss"]) == 25


def test_outputs_without_any_record_are_shown_without_a_bill(tmp_path: Path, params: Params) -> None:
    with pytest.raises(CostError):
        read_findings(tmp_path, params)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/evaluate.json").write_text('{"gold_sft": 0.5}')
    findings = read_findings(tmp_path, params)
    assert findings.ledger.state == NO_RUN
    assert findings.value("evaluate", "gold_sft") == 0.5
    with pytest.raises(CostError):
        read_findings(tmp_path, params, "no-such-run")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]"])
def test_broken_files_become_notes_not_crashes(tmp_path: Path, params: Params, content: bytes) -> None:
    write_pipeline_run(tmp_path)
    for name in ("metrics/evaluate.json", "evaluation/samples.jsonl", "plots/reward_calibration.csv"):
        (tmp_path / name).write_bytes(content)
    findings = read_findings(tmp_path, params)
    assert findings.metrics["evaluate"] == {}
    assert findings.samples == []
    assert findings.calibration == []
    assert len(findings.notes) >= 1 if content != b"[1]" else findings.notes == []


def test_skipped_rows_are_reported(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    with (tmp_path / "runs/sft/usage.jsonl").open("a") as file:
        file.write('{"cut')
    assert len(read_findings(tmp_path, params).notes) == 1


def test_a_metric_counts_only_if_it_is_a_finite_number() -> None:
    assert finite(1) == 1.0
    assert [finite(value) for value in (True, None, "0.5", float("nan"), float("inf"))] == [None] * 5


def test_rows_of_the_fixture_are_those_of_the_schema(tmp_path: Path) -> None:
    write_pipeline_run(tmp_path)
    assert jsonl.read(tmp_path / "runs/ppo/attempts.jsonl", AttemptRow).skipped == 0
    assert json.loads((tmp_path / "metrics/ppo.json").read_text())["kl"] == 7.9
