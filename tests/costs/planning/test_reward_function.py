"""A reward function in a plan: its seconds, as the reward stage measured them."""

import json
from pathlib import Path

import pytest

from config.load import load
from costs.planning.planner import plan
from costs.planning.reward_function import UNMEASURED_SECONDS, seconds_per_reply
from costs.planning.target import find_target
from tests.conftest import ROOT

FUNCTION = "reward={kind: function, path: mine.py:score, timeout_seconds: 5.0}"


def test_its_seconds_are_in_the_loop_and_in_the_evaluation_once_they_are_measured(tmp_path: Path) -> None:
    params = load(ROOT / "recipes/demo.yaml", [FUNCTION, "align.method=rloo", "ppo.value_init=sft"])
    target = find_target(params, None, None, None, tmp_path)
    assert seconds_per_reply(params, tmp_path) == UNMEASURED_SECONDS
    before = {stage.stage: stage for stage in plan(params, target).stages}
    for path, content in (
        ("models/reward/function.json", {"path": "mine.py:score"}),
        ("metrics/reward.json", {"seconds_per_reply": 0.5}),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    after = {stage.stage: stage for stage in plan(params, target).stages}
    more = 0.5 - UNMEASURED_SECONDS
    replies = {"reward": 400, "rloo": 24 * 128, "evaluate": 3 * 400}
    for stage, count in replies.items():
        grown = after[stage].seconds - before[stage].seconds
        assert grown == pytest.approx(count * more, rel=1e-6)
        assert after[stage].usd.expected > before[stage].usd.expected
    score = next(phase for phase in after["rloo"].phases if phase.phase == "score")
    assert score.seconds == pytest.approx(0.5 * 24 * 128)


def test_without_a_function_it_takes_nothing() -> None:
    assert seconds_per_reply(load(ROOT / "recipes/demo.yaml"), ROOT) == 0.0
