"""The judge in a plan: its time, and the money of an endpoint, which a budget must know."""

from pathlib import Path

import pytest

from config.load import load
from config.schema import Params
from costs.planning.judge import QUESTION_TOKENS, judge_plan
from costs.planning.planner import plan
from costs.planning.rows import count
from costs.planning.settings import response_tokens
from costs.planning.target import find_target
from tests.conftest import ROOT

ENDPOINT = (
    "evaluate.judge={kind: endpoint, url: 'http://x/v1', model: m, key_variable: null, "
    "usd_per_million_prompt_tokens: 2.0, usd_per_million_reply_tokens: 0.0, max_usd: %s, "
    "parallel: 4, timeout_seconds: 60.0}"
)


def params(*judge: str) -> Params:
    return load(ROOT / "recipes/demo.yaml", ["data.judge_fraction=0.2", *judge])


def test_an_endpoint_is_paid_for_every_question_in_both_orders() -> None:
    paid = params(ENDPOINT % "null")
    target = find_target(paid, None, None, None, Path("nowhere"))
    rows = count(paid, target.root)
    result = judge_plan(paid, target, rows)
    assert result is not None
    pairs = 500 + 400  # of people, of the evaluation
    people = 500 * (rows.preference_tokens - rows.prompt_tokens)
    replies = 400 * response_tokens(rows, 48)
    tokens = 2 * (pairs * (QUESTION_TOKENS + rows.prompt_tokens) + 2 * (people + replies))
    assert result.usd == pytest.approx(2e-6 * tokens)
    assert result.seconds == pytest.approx(2 * pairs / 4)
    without = plan(params(), target, ("evaluate",)).stages[0]
    whole = plan(paid, target, ("evaluate",)).stages[0]
    assert whole.phases[-1].phase == "judge"
    assert whole.seconds == pytest.approx(without.seconds + result.seconds)
    rented = result.seconds / 3600 * target.of(paid, "evaluate").price.expected
    assert whole.usd.expected == pytest.approx(without.usd.expected + result.usd + rented)
    assert whole.usd.expected == pytest.approx(sum(phase.usd for phase in whole.phases))
    assert whole.time_interval.low < whole.seconds < whole.time_interval.high


def test_a_cap_limits_what_is_planned() -> None:
    capped = params(ENDPOINT % "0.01")
    target = find_target(capped, None, None, None, Path("nowhere"))
    result = judge_plan(capped, target, count(capped, target.root))
    assert result is not None
    assert result.usd == 0.01


@pytest.mark.parametrize(
    ("judge", "of_reward"), [("{kind: reward_model, path: null}", 0.25), ("{kind: embedding, path: x}", 0.0)]
)
def test_a_judge_that_learns_takes_the_time_of_its_pairs(judge: str, of_reward: float) -> None:
    learning = params(f"evaluate.judge={judge}")
    target = find_target(learning, None, None, None, Path("nowhere"))
    reward, evaluation = plan(learning, target, ("reward", "evaluate")).stages
    train = next(phase.seconds for phase in reward.phases if phase.phase == "train")
    judged = evaluation.phases[-1]
    assert judged.phase == "judge"
    assert judged.seconds > of_reward * train
    fewer = learning.model_copy(update={"data": learning.data.model_copy(update={"judge_fraction": 0.05})})
    assert plan(fewer, target, ("evaluate",)).stages[0].phases[-1].seconds < judged.seconds


def test_people_and_nobody_take_none_of_the_runs_time() -> None:
    people = params("evaluate.judge={kind: people, path: data/judge/votes.jsonl, fewest: 20}")
    target = find_target(people, None, None, None, Path("nowhere"))
    for judged in (people, params()):
        assert judge_plan(judged, target, count(judged, target.root)) is None
