"""The section Served: prices at the knee, and when a cheaper way has paid for itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from config import jsonl
from config.load import load
from config.records import kept_folder
from config.schema import Params
from config.workspace.benchmarked import Usage, keep_benchmark
from config.workspace.served import SERVED, ServedRow
from reporting.inputs import read_findings
from reporting.numbers import short
from reporting.page import page
from reporting.summary import summary
from tests.conftest import ROOT
from tests.reporting.plausible_run import write_pipeline_run
from tests.support.benchmarks import benchmark

RUN = "20261121-120000-a1b2"
DIGESTS = {"ppo": "aligned.dir", "distill": "student.dir"}


@pytest.fixture
def params() -> Params:
    return load(ROOT / "recipes/demo.yaml")


def lock(root: Path, run_id: str) -> None:
    """The run's models by digest."""
    stages = {
        name: {"outs": [{"path": f"models/{stage}", "md5": DIGESTS[stage]}]}
        for name, stage in (("align@ppo", "ppo"), ("distill", "distill"))
    }
    kept_folder(root, run_id).mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump({"stages": stages})
    (kept_folder(root, run_id) / "dvc.lock").write_text(content)


def test_a_run_without_a_benchmark_has_no_section(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    html = page(read_findings(tmp_path, params, RUN))
    assert 'id="served"' not in html
    assert "#served" not in html


def test_prices_are_those_of_the_knee_and_a_quantised_file_pays_at_once(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    lock(tmp_path, RUN)
    keep_benchmark(tmp_path, RUN, "aligned.dir", benchmark("f32", {1: 100.0, 2: 250.0, 4: 900.0}))
    keep_benchmark(tmp_path, RUN, "aligned.dir", benchmark("q8_0", {1: 120.0, 2: 300.0, 4: 900.0}))
    keep_benchmark(tmp_path, RUN, "aligned.dir", benchmark("q4_0", {1: 90.0, 2: 200.0, 4: 900.0}))
    findings = read_findings(tmp_path, params, RUN)
    html = page(findings)
    assert 'href="#served"' in html
    # 3.6 USD an hour; at the knee 250, 300 and 200 output and 200 input tokens a second
    for price in (0.001 / 450, 0.001 / 500, 0.001 / 400):
        assert f"${1e6 * price:.2f}" in html
    assert html.count(">at once<") == 1
    assert html.count("never: it is no cheaper") == 1
    assert "rlhf serve has not served anything yet" in html
    assert "| served |  | $2.00 per M tokens |  | 300 tokens/s, p95 TPOT 2 ms |" in summary(findings)


def test_a_benchmark_that_was_stopped_replaces_no_whole_one(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    lock(tmp_path, RUN)
    for loads, is_whole in (({1: 1.0}, False), ({1: 2.0, 2: 3.0}, True), ({1: 4.0}, False)):
        keep_benchmark(tmp_path, RUN, "aligned.dir", benchmark("f32", loads), is_whole)
        (kept,) = read_findings(tmp_path, params, RUN).benchmarks
        assert len(kept.loads) == (2 if loads != {1: 1.0} else 1)


def test_benchmarks_of_another_model_are_not_shown(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    lock(tmp_path, RUN)
    keep_benchmark(tmp_path, RUN, "another.dir", benchmark("f32", {1: 100.0}))
    assert read_findings(tmp_path, params, RUN).benchmarks == ()
    # the same model, served by a later run
    lock(tmp_path, "later")
    keep_benchmark(tmp_path, "later", "aligned.dir", benchmark("f32", {1: 100.0}))
    assert len(read_findings(tmp_path, params, RUN).benchmarks) == 1


def test_a_student_has_paid_for_itself_after_so_many_tokens(tmp_path: Path) -> None:
    params = load(ROOT / "recipes/demo-distill.yaml")
    write_pipeline_run(tmp_path)
    lock(tmp_path, RUN)
    keep_benchmark(tmp_path, RUN, "student.dir", benchmark("f32", {1: 300.0}))
    lock(tmp_path, "teacher")
    keep_benchmark(tmp_path, "teacher", "aligned.dir", benchmark("f32", {1: 100.0}))
    findings = read_findings(tmp_path, params, RUN)
    assert [teacher_benchmark.loads[0].tokens_per_second for teacher_benchmark in findings.teacher_benchmarks] == [
        100.0
    ]
    assert ">at once<" not in page(findings)  # this run made no student
    ppo = findings.ledger.stage("ppo")
    assert ppo is not None
    ledger = replace(findings.ledger, stages=(*findings.ledger.stages, replace(ppo, stage="distill")))
    # 0.001 USD a second for 300 tokens in each, and for 500
    saved = 0.001 / 300 - 0.001 / 500
    assert f">{short(ppo.usd / saved)} tokens<" in page(replace(findings, ledger=ledger))


def test_what_was_served_shares_the_cost_of_training(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    lock(tmp_path, RUN)
    keep_benchmark(tmp_path, RUN, "aligned.dir", benchmark("f32", {1: 100.0}))
    usage = Usage(wall_seconds=1800, busy_seconds=9, input_tokens=3e6, output_tokens=1e6)
    row = ServedRow(time=0.0, run_id=RUN, usd_per_hour=2.0, usage=usage)
    jsonl.append(tmp_path / SERVED, row)
    jsonl.append(tmp_path / SERVED, row.model_copy(update={"run_id": "another"}))
    findings = read_findings(tmp_path, params, RUN)
    assert (findings.served.tokens, findings.served.usd) == (4e6, 1.0)
    assert "4.00 M tokens were served so far, for $1.00" in page(findings).replace("4.0 M", "4.00 M")
