"""The verdict follows the intervals, not the point estimates, and hacking goes before winning."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load
from config.schema import Params
from reporting.inputs import read_findings
from reporting.key_figures import key_figure
from reporting.verdict import Verdict, usd_per_win_rate_point, verdict
from tasks.run.run import locked
from tests.reporting.plausible_run import BEGIN, Clock, write_cached_run, write_pipeline_run


@pytest.fixture
def params() -> Params:
    return load(Path(__file__).parents[2] / "recipes" / "demo.yaml")


def judged(root: Path, params: Params, **changes: Any) -> Verdict:
    path = root / "metrics/evaluate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return verdict(read_findings(root, params))


def test_a_gold_interval_above_one_half_is_success(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    good = judged(tmp_path, params)
    assert (good.tone, good.title) == ("good", "Alignment worked")
    assert "87.3% (83.7% to 90.2%)" in good.sentence
    assert "no sign of reward hacking" in good.sentence


def test_an_interval_that_holds_one_half_decides_nothing(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    assert judged(tmp_path, params, win_rate_gold_low=0.5).tone == "open"
    assert judged(tmp_path, params, win_rate_gold_low=0.4, win_rate_gold_high=0.5).tone == "open"
    assert (
        judged(tmp_path, params, win_rate_gold_low=0.4, win_rate_gold_high=0.499).title
        == "Alignment did harm"
    )


def test_reward_hacking_is_bad_whatever_the_score(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    hacked = judged(tmp_path, params, reward_hacking=True)
    assert (hacked.tone, hacked.title) == ("bad", "Reward hacking")
    assert "0.566 to 0.884" in hacked.sentence


def test_hacking_that_the_prompts_can_not_decide_is_neither_claimed_nor_denied(
    tmp_path: Path, params: Params
) -> None:
    write_pipeline_run(tmp_path)
    undecided = judged(tmp_path, params, reward_hacking=None, reward_hacking_prompts_needed=1250)
    assert (undecided.tone, undecided.title) == ("good", "Alignment worked")
    assert "not decided (about 1,250 prompts would tell)" in undecided.sentence
    assert "no sign" not in undecided.sentence


def test_without_gold_the_verdict_says_that_it_is_the_proxys(
    tmp_path: Path, params: Params
) -> None:
    write_pipeline_run(tmp_path, gold=False)
    proxy = verdict(read_findings(tmp_path, params))
    assert (proxy.tone, proxy.title) == ("good", "Score rose")
    assert "no gold score" in proxy.sentence


def test_a_run_that_failed_says_where_and_why(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "a", BEGIN)
    clock.pipeline("start")
    clock.attempt("sft", 1, "start")
    clock.use("sft", 1, "train", 1, 36.0)
    clock.attempt("sft", 1, "end", exit_code=1, message="loss is nan")
    clock.pipeline("end", state="failed")
    failed = verdict(read_findings(tmp_path, params))
    assert failed.tone == "open"
    assert "stage sft (failed: loss is nan)" in failed.sentence
    assert "36 s and cost $0.0010" in failed.sentence


def test_a_run_at_work_is_not_told_as_ended_and_one_that_was_killed_not_as_at_work(
    tmp_path: Path, params: Params
) -> None:
    clock = Clock(tmp_path, "a", BEGIN)
    clock.pipeline("start")
    clock.attempt("ppo", 1, "start")
    clock.use("ppo", 1, "train", 1, 36.0)
    with locked(tmp_path):
        running = read_findings(tmp_path, params)
        assert running.ledger.state == running.ledger.stages[-1].state == "running"
        assert verdict(running).sentence.startswith(
            "The run is at work in stage ppo: there is no evaluation yet."
        )
    killed = read_findings(tmp_path, params)
    assert killed.ledger.state == "unfinished"
    assert "ended in stage ppo" in verdict(killed).sentence


def test_a_failed_stage_was_not_done_twice(tmp_path: Path, params: Params) -> None:
    for run_id, number in (("a", 1), ("b", 2)):
        clock = Clock(tmp_path, run_id, BEGIN + 100 * number)
        clock.pipeline("start")
        clock.attempt("data", number, "start")
        clock.use("data", number, "read", 0, 36.0)
        clock.attempt("data", number, "end", exit_code=2, message="no such file")
        clock.pipeline("end", state="failed")
    sentence = verdict(read_findings(tmp_path, params, "a")).sentence
    assert "twice" not in sentence
    assert "$0.0010 of it for work that was lost or done again" in sentence


def test_ties_are_named(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    some = judged(
        tmp_path,
        params,
        win_rate_gold=0.5,
        win_rate_gold_low=0.3,
        win_rate_gold_high=0.7,
        ties_gold=15,
        prompts=16,
    )
    assert "15 ties of 16" in some.sentence
    every = judged(tmp_path, params, ties_gold=16)
    assert (every.tone, every.title) == ("open", "No clear effect")
    assert "wins" not in every.sentence
    assert "tie on each of the 16 prompts on the gold score" in every.sentence


def test_the_bill_of_an_unchanged_run_is_what_it_saved(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    first = read_findings(tmp_path, params)
    write_cached_run(tmp_path)
    second = read_findings(tmp_path, params)
    assert second.ledger.total_usd == 0.0
    assert second.ledger.saved_usd == pytest.approx(first.ledger.total_usd - first.ledger.waste_usd)
    assert verdict(second).title == "Alignment worked"
    assert "every stage was reused" in verdict(second).sentence


def test_each_stage_has_its_key_figure(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    metrics = read_findings(tmp_path, params).metrics
    assert {stage: key_figure(stage, content) for stage, content in metrics.items() if content} == {
        "data": "25,974 rows",
        "sft": "eval loss 0.641",
        "reward": "accuracy 83.2% of 84.8% possible",
        "ppo": "score 1.62, KL 7.90",
        "evaluate": "gold 0.566 → 0.884",
    }
    assert key_figure("evaluate", {"gold_sft": None, "win_rate_reward": 0.931}) == "win rate 93.1%"
    assert key_figure("dpo", {"accuracy": 0.871, "margin": 1.25}) == "accuracy 87.1%, margin 1.25"
    assert {key_figure(stage, {}) for stage in metrics} == {""}


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"win_rate_gold": 0.75, "win_rate_reward": 0.9}, 0.75),
        ({"win_rate_gold": None, "win_rate_reward": 0.6}, 0.6),
        ({"win_rate_gold": 0.5, "win_rate_reward": 0.9}, None),
        ({"win_rate_gold": None, "win_rate_reward": None}, None),
    ],
)
def test_a_point_is_paid_by_what_making_the_model_cost_on_the_best_evidence(
    tmp_path: Path, params: Params, changes: dict[str, Any], rate: float | None
) -> None:
    write_pipeline_run(tmp_path)
    judged(tmp_path, params, **changes)
    findings = read_findings(tmp_path, params)
    wanted = None if rate is None else findings.ledger.made_usd / (100 * (rate - 0.5))
    assert usd_per_win_rate_point(findings) == (None if wanted is None else pytest.approx(wanted))


def test_a_run_that_has_begun_no_stage_is_said_to_be_at_work(
    tmp_path: Path, params: Params
) -> None:
    clock = Clock(tmp_path, "r", BEGIN)
    clock.pipeline("start")
    with locked(tmp_path):
        sentence = verdict(read_findings(tmp_path, params)).sentence
    assert sentence.startswith("The run is at work: ")
