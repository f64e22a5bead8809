import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import RewardConfig, RewardTrainer

from config import jsonl
from config.errors import DataError, TrainingDiverged
from config.records import UsageRow
from tests.training.support.processes import killed_stopped_and_resumed, metrics
from tests.training.support.tiny import (
    FAMILIES,
    files,
    open_stage,
    params,
    prompts,
    random_responses,
    reward_model,
    tokenizer,
    work,
)
from training.evaluation.intervals import wilson
from training.evaluation.reliability import expected_calibration_error, pair_accuracy, reliability
from training.modeling.models import load_reward_model
from training.modeling.scoring import raw_scores, score, score_in_pairs
from training.modeling.tokenizer import encode_prompt, encode_response, load_tokenizer
from training.reward import margins, read_sequences, store_normalisation
from training.rl.layouts import load_roles

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


def test_pairs_are_prompt_and_reply_as_one_sequence(finished: Path) -> None:
    stage, _ = open_stage(finished, "reward")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    rows = list(jsonl.plain(finished / "data/prepared/preference/test.jsonl"))
    pairs = read_sequences(stage, "test")
    assert pairs.too_long == 0
    for row, pair in zip(rows, pairs.rows, strict=True):
        prompt = encode_prompt(tokenizer, row["prompt"])
        assert pair == {
            f"{side}_ids": prompt + encode_response(tokenizer, row[side]) for side in ("chosen", "rejected")
        }


def test_pairs_that_are_too_long_are_left_out_and_counted(project: Project) -> None:
    root = project("reward", reward={"max_length": 50})
    stage, _ = open_stage(root, "reward")
    pairs = read_sequences(stage, "train")
    total = len((root / "data/prepared/preference/train.jsonl").read_text().splitlines())
    assert 0 < len(pairs.rows) < total
    assert len(pairs.rows) + pairs.too_long == total
    assert max(len(ids) for row in pairs.rows for ids in row.values()) <= 50


def test_no_fitting_pair_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("reward", reward={"max_length": 3}), "reward")
    with pytest.raises(DataError, match=r"reward\.max_length=3"):
        run(stage)


def test_the_figures_are_those_of_the_saved_model_on_the_held_out_pairs(finished: Path) -> None:
    stage, _ = open_stage(finished, "reward")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    model = load_reward_model(finished / "models/reward", params().model, tokenizer).eval()
    rows = read_sequences(stage, "test").rows
    result = metrics(finished, "reward")
    held_out = np.array(
        [
            float(raw_scores(model, [row["chosen_ids"]], 1) - raw_scores(model, [row["rejected_ids"]], 1))
            for row in rows
        ]
    )
    assert margins(model, rows, 4096) == pytest.approx(held_out, abs=1e-5)
    assert result["accuracy"] == pair_accuracy(held_out)
    assert (result["accuracy_low"], result["accuracy_high"]) == pytest.approx(
        wilson(result["accuracy"] * len(rows), len(rows))[1:]
    )
    assert result["ece"] == pytest.approx(expected_calibration_error(reliability(held_out)), abs=1e-5)
    data = metrics(finished, "data")
    assert {name: result[name] for name in ("bayes_accuracy", "baseline_longer_wins", "baseline_bow")} == {
        name: data[name] for name in ("bayes_accuracy", "baseline_longer_wins", "baseline_bow")
    }


def test_scores_of_the_training_replies_have_mean_zero_and_deviation_one(finished: Path) -> None:
    stage, _ = open_stage(finished, "reward")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    model = load_reward_model(finished / "models/reward", params().model, tokenizer).eval()
    pairs = read_sequences(stage, "train").rows
    scores = score(model, [ids for row in pairs for ids in row.values()], 4096)
    assert float(scores.mean()) == pytest.approx(0, abs=1e-4)
    assert float(scores.std()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("same_prompt", [False, True])
def test_loss_and_gradient_of_every_weight_are_those_of_trls_padded_batch(
    family: str, same_prompt: bool, tmp_path: Path
) -> None:
    pair_prompts = prompts(6) if not same_prompt else [prompts(1)[0]] * 6
    replies = random_responses([3, 1, 7, 2, 9, 4, 1, 1, 5, 5, 2, 8])
    rows = [
        {"chosen_ids": [*ids, *chosen, 2], "rejected_ids": [*ids, *rejected, 2]}
        for ids, chosen, rejected in zip(pair_prompts, replies[::2], replies[1::2], strict=True)
    ]
    model = reward_model(family=family)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(str(tmp_path), max_length=None, use_cpu=True, report_to="none", bf16=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    result = []
    for once in (False, True):
        if once:
            score_in_pairs(model)
        model.zero_grad()
        loss = trainer.compute_loss(model, trainer.data_collator(rows))
        loss.backward()
        result.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (theirs, expected), (ours, gradients) = result
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_normalisation_can_be_turned_off_and_constant_scores_are_named() -> None:
    rows = [{"chosen_ids": [1, 5, 6, 2], "rejected_ids": [1, 7, 2]}]
    model = reward_model()
    store_normalisation(model, rows, normalise=False, budget_tokens=100)
    assert (model.config.score_mean, model.config.score_std) == (0.0, 1.0)
    store_normalisation(model, rows, normalise=True, budget_tokens=100)
    assert model.config.score_std != 1.0
    with torch.no_grad():
        model.score.weight.zero_()
    with pytest.raises(TrainingDiverged, match="cannot tell them apart"):
        store_normalisation(model, rows, normalise=True, budget_tokens=100)


def test_training_tells_replies_apart_and_counts_every_token_once(finished: Path) -> None:
    stage, _ = open_stage(finished, "reward")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    model = load_reward_model(finished / "models/reward", params().model, tokenizer).eval()
    pairs = read_sequences(stage, "train").rows
    assert pair_accuracy(margins(model, pairs, 4096)) > 0.6
    rows = jsonl.read(finished / "runs/reward/usage.jsonl", UsageRow).rows
    trained = [row for row in rows if row.phase in ("start", "train")]
    result = [{tuple(ids[: n + 1]) for ids in row.values() for n in range(len(ids))} for row in pairs]
    assert sum(row.tokens for row in trained) == 3 * sum(len(read) for read in result)
    assert sum(row.sequences for row in trained) == 3 * 2 * len(pairs)


def test_a_reward_model_may_start_from_the_base(project: Project) -> None:
    root = project("reward", reward={"init": "base", "max_steps": 2})
    (root / "models/sft/model.safetensors").write_bytes(b"not read")
    work(root, "reward")
    assert metrics(root, "reward")["steps"] == 2


@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, finished: Path
) -> None:
    root = project("reward")
    killed_stopped_and_resumed(root, "reward", kill_at=6, stop_at=15)
    assert files(root / "models/reward") == files(finished / "models/reward")
    assert json.loads((root / "metrics/reward.json").read_text()) == metrics(finished, "reward")
    assert not list((root / "checkpoints/reward").glob("*/step-*"))


def test_a_smaller_reward_model_and_the_value_model_that_starts_from_it(project: Project) -> None:
    root = project("reward", reward={"layers": 1, "max_steps": 2})
    work(root, "reward")
    stage, tokenizer = open_stage(root, "ppo")[0], load_tokenizer(root / "data/tokenizer")
    assert stage.params.section("ppo").value_init == "reward"
    roles = load_roles(stage, tokenizer)
    assert isinstance(roles.reward_model, torch.nn.Module)
    assert isinstance(roles.value_model, torch.nn.Module)
    layers = [item.config.num_hidden_layers for item in (roles.policy, roles.reward_model, roles.value_model)]
    assert layers == [2, 1, 1]
