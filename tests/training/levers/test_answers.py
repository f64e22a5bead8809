"""Best-of-n, and the quality of what a policy sampled while it learned."""

import json
import math
from pathlib import Path

import pytest

from tests.training.support.tiny import params
from training.levers.answers import best_of, learning_curve
from training.preparation.helpdesk import gold_score
from training.preparation.worlds import world_of


def test_best_of_n_keeps_the_reply_that_the_reward_model_prefers() -> None:
    found = {"replies": 4, "rewards": [1, 4, 3, 2, 9, 8, 7, 6], "golds": [0, 1, 2, 3, 4, 5, 6, 7]}
    assert best_of(found, 4)["golds"] == [1, 4]
    two = best_of(found, 2)
    assert (two["golds"], two["replies"]) == ([1, 2, 4, 6], 2)
    assert two["kl"] == pytest.approx(math.log(2) - 0.5)
    assert best_of(found, 1)["rewards"] == found["rewards"]
    assert best_of(found, 1)["kl"] == 0


def written(path: Path, rows: list[tuple[int, int, str, str, float]]) -> Path:
    keys = ("step", "index", "prompt", "response", "score")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


def test_the_curve_is_the_gold_score_of_each_updates_responses(finished: Path, tmp_path) -> None:
    lines = (finished / "data/prepared/sft/train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:2]]
    made = params()
    world = world_of(made.data.source)  # type: ignore[arg-type]
    golds = [gold_score(row["prompt"], row["completion"], world) for row in rows]
    path = written(
        tmp_path / "rollouts.jsonl",
        [
            (1, 0, rows[0]["prompt"], "nothing of use", 0.1),
            (1, 0, rows[0]["prompt"], rows[0]["completion"], 0.9),  # done again after a stop
            (1, 1, rows[1]["prompt"], rows[1]["completion"], 0.9),
            (2, 0, rows[0]["prompt"], rows[0]["completion"], 0.9),
        ],
    )
    first, second = learning_curve(path, made)
    assert (first["update"], first["n"], second["n"]) == (1, 2, 1)
    assert first["mean"] == pytest.approx(sum(golds) / 2)
    assert second["std"] == 0


def test_without_a_gold_score_the_curve_is_the_reward_models(tmp_path: Path) -> None:
    path = written(tmp_path / "rollouts.jsonl", [(1, 0, "of no world", "x", 0.25)])
    (only,) = learning_curve(path, params())
    assert only["mean"] == 0.25
