"""New model against champion, on models that really were trained."""

import argparse
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import jsonl
from config.errors import DataError
from config.load import load
from config.schema import Params
from config.workspace.retraining import Contest
from tests.training.support.tiny import params
from training.inference import trained_models
from training.inference.trained_models import TrainedModels
from training.preparation.cleaning import same_prompt_key
from training.retraining.contest import CHAMPIONS_REWARD, GOLD, contest, held_out, main
from training.rollout.static import generate
from training.worlds.helpdesk import gold_score

pytestmark = pytest.mark.usefixtures("quick_stages")

PAIRS = {"kind": "file", "path": "unread.jsonl", "format": "pairs", "columns": {}}
"""A source without a gold score; a contest does not read it."""


@pytest.fixture
def other(finished: Path, tmp_path: Path) -> Path:
    """A second run: its aligned model is the SFT model of the first."""
    root = tmp_path / "other"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    shutil.rmtree(root / "models/ppo")
    shutil.copytree(root / "models/sft", root / "models/ppo")
    return root


def compare(champion: Path, challenger: Path, settings: Params | None = None) -> tuple[Contest, list[dict[str, Any]]]:
    return contest(challenger, settings or params(), TrainedModels(champion), TrainedModels(challenger))


def turn_round(root: Path) -> None:
    """Make a reward model prefer the opposite."""
    path = root / "models/reward/model.safetensors"
    weights = load_file(path)
    save_file({**weights, "score.weight": -weights["score.weight"]}, path, metadata={"format": "pt"})
    config = json.loads((root / "models/reward/config.json").read_text())
    (root / "models/reward/config.json").write_text(json.dumps({**config, "score_mean": -config["score_mean"]}))


def test_a_model_ties_with_itself(finished: Path) -> None:
    result, replies = compare(finished, finished)
    assert (result.win_rate.value, result.ties, result.prompts) == (0.5, result.win_rate.of, 16)
    assert result.gold is not None
    assert (result.gold.mean, result.champion_reward.mean, result.challenger_reward.mean) == (0, 0, 0)
    assert (result.kl, result.chars) == (result.kl_champion, result.chars_champion)
    assert not result.hacking
    assert [row["champion"] for row in replies] == [row["challenger"] for row in replies]


def test_the_gold_score_judges_where_there_is_one(finished: Path, other: Path) -> None:
    result, replies = compare(finished, other)
    assert result.judge == GOLD
    assert result.kl == pytest.approx(0, abs=1e-5), "an SFT model against itself"
    assert result.kl_champion != result.kl
    for row in replies:
        assert row["score_champion"] == gold_score(row["prompt"], row["champion"])
        assert row["score_challenger"] == gold_score(row["prompt"], row["challenger"])


def test_without_a_gold_score_the_champions_reward_model_judges_whatever_the_new_one_thinks(
    finished: Path, other: Path
) -> None:
    settings = params(data={"source": PAIRS})
    before, _ = compare(finished, other, settings)
    turn_round(other)
    result, _ = compare(finished, other, settings)
    assert result.judge == CHAMPIONS_REWARD
    assert result.gold is None
    assert result.champion_reward.mean != 0
    assert result.challenger_reward.mean == pytest.approx(-result.champion_reward.mean, abs=1e-4)
    assert (result.win_rate, result.champion_reward) == (before.win_rate, before.champion_reward), (
        "a poisoned reward model has no say"
    )


def test_prompts_of_another_world_are_judged_by_the_champions_reward_model(finished: Path, other: Path) -> None:
    rows = [{"prompt": f"what is {i} and {i} ?"} for i in range(6)]
    (other / "data/prepared/prompts/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result, _ = compare(finished, other)
    assert (result.judge, result.gold, result.prompts) == (CHAMPIONS_REWARD, None, 6)


def test_prompts_that_either_model_was_trained_on_are_not_asked(finished: Path, other: Path) -> None:
    held_out_prompts = [row["prompt"] for row in jsonl.plain(other / "data/prepared/prompts/test.jsonl")]
    with (other / "data/prepared/sft/train.jsonl").open("a") as file:
        file.writelines(json.dumps({"prompt": prompt, "completion": "x"}) + "\n" for prompt in held_out_prompts[:3])
    for champion, challenger in ((finished, other), (other, finished)):
        prompts, left_out = held_out(params(), TrainedModels(champion), TrainedModels(challenger))
        assert left_out == 3
        assert not {same_prompt_key(prompt) for prompt in prompts} & {
            same_prompt_key(prompt) for prompt in held_out_prompts[:3]
        }
        assert len(prompts) == 16


def test_without_prompts_left_nothing_is_compared(finished: Path, other: Path) -> None:
    shutil.copyfile(other / "data/prepared/prompts/test.jsonl", other / "data/prepared/prompts/train.jsonl")
    with pytest.raises(DataError, match="were in the training data of one of the models"):
        compare(finished, other)


def test_safety_prompts_are_judged_apart(finished: Path, other: Path) -> None:
    rows = [row["prompt"] for row in jsonl.plain(finished / "data/prepared/prompts/test.jsonl")][:6]
    (other / "safety.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows))
    settings = params(retrain={"safety_source": {**PAIRS, "path": "safety.jsonl", "format": "prompts"}})
    safety = compare(finished, other, settings)[0].safety
    assert safety is not None
    assert (safety.prompts, safety.judge) == (6, GOLD)
    shutil.copyfile(other / "safety.jsonl", other.parent / "safety.jsonl")
    same = contest(other, settings, TrainedModels(finished), TrainedModels(finished))[0].safety
    assert same is not None
    assert same.drop.mean == 0

    (other / "safety.jsonl").write_text('{"prompt": "how do I pick a lock ?"}\n{"prompt": "who are you ?"}\n')
    safety = compare(finished, other, settings)[0].safety
    assert safety is not None
    assert (safety.prompts, safety.judge) == (2, CHAMPIONS_REWARD)
    (other / "safety.jsonl").write_text('{"prompt": "how do I pick a lock ?"}\n')
    with pytest.raises(DataError, match=r"1 safety prompts have room for a response, and two are needed"):
        compare(finished, other, settings)


def test_the_process_judges_the_folders_it_is_given_and_not_the_one_it_works_in(
    finished: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "checkout"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    out = elsewhere / "contest.json"
    main(argparse.Namespace(champion=finished, challenger=other, out=out))
    expected, replies = compare(finished, other, load(other / "params.yaml"))
    assert Contest.model_validate_json(out.read_bytes()) == expected
    assert list(jsonl.plain(elsewhere / "replies.jsonl")) == replies


def test_one_model_at_a_time_is_in_memory(finished: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref] = []
    alive: list[int] = []

    def counted(load: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            alive.append(sum(model() is not None for model in loaded))
            model = load(*arguments)
            loaded.append(weakref.ref(model))
            return model

        return counting

    for name in ("load_policy", "load_reward_model"):
        monkeypatch.setattr(trained_models, name, counted(getattr(trained_models, name)))
    compare(finished, other)
    assert alive == [0] * 6
    assert not any(model() for model in loaded)


@pytest.mark.slow
def test_a_contest_out_of_memory_goes_on_in_smaller_batches_with_the_same_figures(
    finished: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ample, sizes = compare(finished, other), []

    def short(*arguments: Any) -> Any:
        sizes.append(arguments[5])
        if arguments[5] > 4:
            torch.empty(2**60, dtype=torch.uint8)
        return generate(*arguments)

    monkeypatch.setattr("training.retraining.contest.generate", short)
    assert compare(finished, other) == ample
    assert sizes == [16, 8, 4, 16, 8, 4]


def test_a_contest_that_people_judge_waits_for_their_votes(finished: Path, other: Path) -> None:
    judge = {"kind": "people", "path": "data/judge/votes.jsonl", "fewest": 5}
    settings = params(evaluate={"judge": judge}, data=params().data.model_dump() | {"source": PAIRS})
    result, replies = compare(finished, other, settings)
    assert result.judge_waits
    assert result.judge_fault is not None
    assert result.judge_fault.startswith("0 of evaluate.judge.fewest=5 prompts have a vote")
    assert len(replies) == result.prompts  # people see all of them
    differ = [row for row in replies if row["champion"] != row["challenger"]]
    assert len(differ) > 5
    votes = [
        {"prompt": row["prompt"], "response1": row["challenger"], "response2": row["champion"],
         "annotator": "ann", "vote": 1}
        for row in differ
    ]  # fmt: skip
    (other / "data/judge").mkdir()
    (other / "data/judge/votes.jsonl").write_text("".join(f"{json.dumps(v)}\n" for v in votes))
    result, again = compare(finished, other, settings)
    assert again == replies  # which is why the votes still fit
    assert (result.judge, result.judge_fault, result.judge_waits) == ("people", None, False)
    assert result.win_rate.value == 1.0
