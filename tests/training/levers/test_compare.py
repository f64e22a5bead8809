"""Paired differences of variants, prompt by prompt or seed by seed."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.levers.compare import compared, paired, qualities


def answers(golds: list[float] | None, rewards: list[float], replies: int = 2) -> dict[str, Any]:
    return {"golds": golds, "rewards": rewards, "replies": replies, "kl": 1.0}


def test_quality_is_the_gold_score_of_each_prompt() -> None:
    assert qualities(answers([0.0, 1.0, 0.5, 0.5], [9, 9, 9, 9]), answers(None, [])) == [0.5, 0.5]


def test_without_gold_it_is_how_often_the_reward_model_prefers_it_to_the_sft_models_replies() -> (
    None
):
    sft = answers(None, [1.0, 3.0, 0.0, 0.0])
    assert qualities(answers(None, [2.0, 4.0, 0.0, -1.0]), sft) == [0.75, 0.25]


def test_few_seeds_are_compared_by_prompts_and_three_by_seeds() -> None:
    ours, theirs = [[1.0, 1.0, 0.7, 0.9]], [[0.9, 0.8, 0.7, 0.8]]
    few = paired(ours, theirs, 0.95)
    assert few.mean == pytest.approx(0.1)
    # Student's t of 3 degrees of freedom, 3.182, times the deviation 0.0816 over 2
    assert few.low == pytest.approx(0.1 - 3.182 * 0.0816497 / 2, abs=1e-4)
    three = paired([[1.0, 0.0], [0.5, 0.5], [0.6, 0.6]], [[0.4, 0.4]] * 3, 0.95)
    assert three.mean == pytest.approx(0.4 / 3)
    assert three.error == pytest.approx(0.057735 / 3**0.5, rel=1e-3)


def test_a_variant_is_held_against_the_baseline_of_its_seed(tmp_path: Path) -> None:
    def written(name: str, content: dict[str, Any]) -> str:
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path / name)

    base = written("base.json", answers([0.5, 0.5, 0.7, 0.9], [0, 0, 0, 0]))
    worse = written("worse.json", answers([0.4, 0.4, 0.6, 0.8], [0, 0, 0, 0]))
    best = written("best.json", {"best_of": [answers([0.6, 0.9], [0, 0], 1) | {"n": 2}]})
    found = compared(
        {
            "confidence": 0.95,
            "baseline": "baseline",
            "sft": [base],
            "variants": {"baseline": [base], "worse": [worse], "best": [f"{best}#2"]},
        }
    )
    assert found["judge"] == "gold"
    assert found["variants"]["baseline"]["difference"] == 0
    assert found["variants"]["worse"]["difference"] == pytest.approx(-0.1)
    assert found["variants"]["worse"]["difference_high"] == pytest.approx(-0.1)
    assert found["variants"]["best"]["difference"] == pytest.approx(0.1)
