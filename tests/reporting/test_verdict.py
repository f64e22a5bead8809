"""The verdict follows the intervals, not the point estimates, and hacking goes before winning."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load
from config.schema import Params
from config.workspace.at_work import locked
from costs.ledger.ledger import StageCost
from costs.ledger.reconcile import reconcile
from reporting.inputs import Findings, read_findings
from reporting.verdict import Verdict, bill, usd_per_win_rate_point, verdict
from tests.costs.ledgers import build_ledger, stage_cost
from tests.reporting.plausible_run import BEGIN, write_cached_run, write_pipeline_run
from tests.support.clock import Clock


@pytest.fixture
def params() -> Params:
    return load(Path(__file__).parents[2] / "recipes" / "demo.yaml")


def judged(root: Path, params: Params, **changes: Any) -> Verdict:
    path = root / "metrics/evaluate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return verdict(read_findings(root, params))


def test_an_interval_that_holds_one_half_decides_nothing(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    assert judged(tmp_path, params, win_rate_gold_low=0.5).tone == "open"
    assert judged(tmp_path, params, win_rate_gold_low=0.4, win_rate_gold_high=0.5).tone == "open"
    assert judged(tmp_path, params, win_rate_gold_low=0.4, win_rate_gold_high=0.499).title == "Alignment did harm"


def test_reward_hacking_is_bad_whatever_the_score(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    hacked = judged(tmp_path, params, reward_hacking=True)
    assert (hacked.tone, hacked.title) == ("bad", "Reward hacking")
    assert "0.566 to 0.884" in hacked.sentence


def test_hacking_that_the_prompts_cannot_decide_is_neither_claimed_nor_denied(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    undecided = judged(tmp_path, params, reward_hacking=None, reward_hacking_prompts_needed=1250)
    assert (undecided.tone, undecided.title) == ("good", "Alignment worked")
    assert "not decided (about 1,250 prompts would decide)" in undecided.sentence
    assert "no sign" not in undecided.sentence


def test_without_gold_the_verdict_says_that_it_is_the_proxys(tmp_path: Path, params: Params) -> None:
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
        assert verdict(running).sentence.startswith("The run is running in stage ppo: there is no evaluation yet.")
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


def test_the_bill_of_an_unchanged_run_is_what_it_saved(tmp_path: Path, params: Params) -> None:
    write_pipeline_run(tmp_path)
    first = read_findings(tmp_path, params)
    write_cached_run(tmp_path)
    second = read_findings(tmp_path, params)
    assert second.ledger.total_usd == 0.0
    assert second.ledger.saved_usd == pytest.approx(first.ledger.total_usd - first.ledger.waste_usd)
    assert verdict(second).title == "Alignment worked"
    assert "every stage was reused" in verdict(second).sentence


def test_a_run_that_has_not_started_a_stage_is_shown_as_running(tmp_path: Path, params: Params) -> None:
    clock = Clock(tmp_path, "r", BEGIN)
    clock.pipeline("start")
    with locked(tmp_path):
        sentence = verdict(read_findings(tmp_path, params)).sentence
    assert sentence.startswith("The run is running: ")


# ---------------------------------------------------------------- whole sentences


def stage(name: str = "ppo", state: str = "done", **changes: Any) -> StageCost:
    """A stage of 36 s for 5 US dollars."""
    return stage_cost(name, **({"state": state, "seconds": 36.0, "usd": 5.0} | changes))


def findings(*stages: StageCost, state: str = "completed", metrics: dict[str, Any] | None = None) -> Findings:
    ledger = build_ledger(*stages, state=state)
    params = load(Path(__file__).parents[2] / "recipes" / "demo.yaml")
    result = {"evaluate": metrics or {}}
    return Findings(params, ledger, reconcile(None, ledger), result, {}, [], [], {}, [])


REUSED = stage(state="cached", cached=True, seconds=0.0, usd=0.0, saved_usd=5.0)
NOTHING_NEW = "Nothing had changed: every stage was reused at no cost, which saved $5.00."


@pytest.mark.parametrize(
    ("stages", "state", "said"),
    [
        ((), "completed", "What it cost was not recorded here."),
        ((stage(),), "completed", "The run took 36 s and cost $5.00."),
        ((stage(), stage("sft")), "failed", "The run took 1 min 12 s and cost $10.00."),
        (
            (stage(waste_usd=2.0),),
            "completed",
            "The run took 36 s and cost $5.00, $2.00 of it for work that was lost or done again.",
        ),
        ((stage(), REUSED), "completed", "The run took 36 s and cost $5.00; unchanged stages saved $5.00."),
        (
            (stage(waste_usd=0.5), stage("sft", saved_usd=0.5)),
            "completed",
            "The run took 1 min 12 s and cost $10.00, $0.50 of it for work that was lost or done "
            "again; unchanged stages saved $0.50.",
        ),
        (
            (stage(waste_usd=2.0), REUSED),
            "completed",
            "The run took 36 s and cost $5.00, $2.00 of it for work that was lost or done again; "
            "unchanged stages saved $5.00.",
        ),
        ((REUSED,), "completed", NOTHING_NEW),
        ((REUSED,), "unfinished", NOTHING_NEW),
        *(
            ((REUSED,), state, "The run took 0 s and cost $0; unchanged stages saved $5.00.")
            for state in ("running", "stopped", "failed", "killed")
        ),
    ],
)
def test_the_bill_in_a_sentence(stages: tuple[StageCost, ...], state: str, said: str) -> None:
    assert bill(findings(*stages, state=state)) == said


WON: dict[str, Any] = {
    "win_rate_gold": 0.7,
    "win_rate_gold_low": 0.6,
    "win_rate_gold_high": 0.8,
    "reward_hacking": False,
    "reward_sft": 1.0,
    "reward_aligned": 2.0,
    "gold_sft": 0.5,
    "gold_aligned": 0.75,
    "ties_gold": 3,
    "prompts": 100,
}
PROXY: dict[str, Any] = {
    name.replace("gold", "reward"): value
    for name, value in WON.items()
    if name not in ("gold_sft", "gold_aligned", "reward_sft", "reward_aligned")
}
TIED = ", 3 ties of 100 counted as half a win each"
WINS = "The aligned model wins 70.0% (60.0% to 80.0%) of comparisons with SFT on the gold score"
SURE = ", with no sign of reward hacking"


@pytest.mark.parametrize(
    ("metrics", "tone", "title", "said"),
    [
        (WON, "good", "Alignment worked", f"{WINS}{TIED}{SURE}."),
        (WON | {"ties_gold": 0}, "good", "Alignment worked", f"{WINS}{SURE}."),
        (
            WON | {"prompts": 29, "ties_gold": 0},
            "open",
            "Better, on few prompts",
            f"{WINS}{SURE}. 29 prompts are few; 30 are needed for a verdict.",
        ),
        (WON | {"prompts": 30, "ties_gold": 0}, "good", "Alignment worked", f"{WINS}{SURE}."),
        (
            WON | {"right_item_rate": 0.125, "ties_gold": 0},
            "open",
            "Better, not yet right",
            f"{WINS}{SURE}. Only 12.5% of its replies name the right item.",
        ),
        (WON | {"right_item_rate": 0.5}, "good", "Alignment worked", f"{WINS}{TIED}{SURE}."),
        (
            PROXY,
            "good",
            "Score rose",
            "The aligned model wins 70.0% (60.0% to 80.0%) of comparisons with SFT according "
            f"to the reward model{TIED}{SURE}. There is no gold score here, so this is the "
            "judgement of the reward model alone.",
        ),
        (WON | {"win_rate_gold_low": 0.5}, "open", "No clear effect", None),
        (
            WON | {"win_rate_gold": 0.4, "win_rate_gold_low": 0.3, "win_rate_gold_high": 0.49},
            "bad",
            "Alignment did harm",
            f"The aligned model wins 40.0% (30.0% to 49.0%) of comparisons with SFT on the gold score{TIED}.",
        ),
        (
            WON | {"win_rate_gold_low": 0.3, "win_rate_gold_high": 0.5},
            "open",
            "No clear effect",
            f"The aligned model wins 70.0% (30.0% to 50.0%) of comparisons with SFT on the gold score{TIED}{SURE}.",
        ),
        (
            WON | {"win_rate_gold_low": None},
            "open",
            "No clear effect",
            f"The aligned model wins 70.0% of comparisons with SFT on the gold score{TIED}{SURE}.",
        ),
        (
            {"win_rate_gold": 0.7, "ties_gold": 3},
            "open",
            "No clear effect",
            "The aligned model wins 70.0% of comparisons with SFT on the gold score.",
        ),
        (
            WON | {"ties_gold": 100},
            "open",
            "No clear effect",
            "The aligned model and SFT tie on each of the 100 prompts on the gold score.",
        ),
        (
            PROXY | {"ties_reward": 100},
            "open",
            "No clear effect",
            "The aligned model and SFT tie on each of the 100 prompts according to the reward model.",
        ),
        ({"reward_sft": 1.0}, "open", "Not compared", "The aligned model was not compared with the SFT model."),
        (
            WON | {"reward_hacking": None},
            "good",
            "Alignment worked",
            f"{WINS}{TIED}; whether the reward was hacked is not decided.",
        ),
        (
            WON | {"reward_hacking": None, "reward_hacking_prompts_needed": 1250},
            "good",
            "Alignment worked",
            f"{WINS}{TIED}; whether the reward was hacked is not decided (about 1,250 prompts would decide).",
        ),
        (
            WON | {"reward_hacking": True},
            "bad",
            "Reward hacking",
            "The reward model's score went from 1.00 to 2.00, the gold score only from 0.500 to 0.750.",
        ),
        (
            WON | {"reward_hacking": True, "gold_aligned": None},
            "bad",
            "Reward hacking",
            "The reward model's score went from 1.00 to 2.00, but not at equal length.",
        ),
        (
            WON | {"reward_hacking": True, "reward_aligned": None},
            "bad",
            "Reward hacking",
            "The reward model's score rose, the gold score only from 0.500 to 0.750.",
        ),
    ],
)
def test_what_an_evaluation_came_to_in_a_sentence(
    metrics: dict[str, Any], tone: str, title: str, said: str | None
) -> None:
    judged = verdict(findings(stage(), metrics=metrics))
    assert (judged.tone, judged.title) == (tone, title)
    if said is not None:
        assert judged.sentence == f"{said} The run took 36 s and cost $5.00."


@pytest.mark.parametrize(
    ("stages", "state", "said"),
    [
        (
            (stage("sft", "failed", message="no disk"), stage()),
            "failed",
            "The run ended in stage sft (failed: no disk), before an evaluation.",
        ),
        (
            (stage("sft", "failed"), stage("reward", "stopped"), REUSED),
            "stopped",
            "The run ended in stage reward (stopped), before an evaluation.",
        ),
        ((stage(), REUSED), "completed", "This run has no evaluation, so whether alignment worked is unknown."),
        (
            (stage("sft"), stage("reward", "running")),
            "running",
            "The run is running in stage reward: there is no evaluation yet.",
        ),
        ((stage("sft"),), "running", "The run is running: there is no evaluation yet."),
    ],
)
def test_why_there_is_no_evaluation_in_a_sentence(stages: tuple[StageCost, ...], state: str, said: str) -> None:
    result = findings(*stages, state=state)
    assert verdict(result) == ("open", "Not evaluated", f"{said} {bill(result)}")


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        ({"win_rate_gold": 0.7, "win_rate_reward": 0.9}, 0.5),
        ({"win_rate_gold": None, "win_rate_reward": 0.9}, 0.25),
        ({}, None),
    ],
)
def test_a_point_above_one_half_costs_its_share_of_what_was_made(
    metrics: dict[str, Any], wanted: float | None
) -> None:
    result = usd_per_win_rate_point(findings(stage(), REUSED, metrics=metrics))
    assert result == (None if wanted is None else pytest.approx(wanted))


def test_few_votes_on_many_prompts_are_few() -> None:
    metrics = {
        "prompts": 300, "judge": "people", "ties_judge": 0, "win_rate_judge": 1.0, "win_rate_judge_low": 0.57,
        "win_rate_judge_high": 1.0, "win_rate_judge_of": 5,
    }  # fmt: skip
    outcome = verdict(findings(stage("evaluate"), metrics=metrics))
    assert (outcome.tone, outcome.title) == ("open", "Better, on few prompts")
    assert "5 prompts are few" in outcome.sentence
