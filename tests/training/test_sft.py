import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from config import jsonl
from config.errors import DataError
from config.records import UsageRow
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics
from tests.training.support.tiny import files, open_stage, params, work
from training.modeling.models import load_policy
from training.modeling.sequences import sequence_logprobs
from training.modeling.tokenizer import encode_prompt, encode_response, load_tokenizer
from training.sft import IGNORED, examples

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


def test_examples_are_prompt_and_completion_with_the_prompt_out_of_the_loss(finished: Path) -> None:
    stage, _ = open_stage(finished, "sft")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    rows = list(jsonl.plain(finished / "data/prepared/sft/train.jsonl"))
    for row, example in zip(rows, examples(stage, "train").rows, strict=True):
        prompt, completion = (encode_prompt(tokenizer, row["prompt"]), encode_response(tokenizer, row["completion"]))
        assert example["input_ids"] == prompt + completion
        assert example["labels"] == [IGNORED] * len(prompt) + completion
        assert completion[-1] == tokenizer.eos_token_id


def test_long_examples_are_cut_and_those_without_a_completion_left_out(project: Project) -> None:
    root = project("sft", sft={"max_length": 36})
    stage, _ = open_stage(root, "sft")
    tokenizer = load_tokenizer(root / "data/tokenizer")
    rows = [json.loads(line) for line in (root / "data/prepared/sft/train.jsonl").read_text().splitlines()]
    fitting = sum(len(encode_prompt(tokenizer, row["prompt"])) < 36 for row in rows)
    assert 0 < fitting < len(rows)
    cut = examples(stage, "train")
    assert len(cut.rows) == fitting
    assert max(len(row["input_ids"]) for row in cut.rows) == max(cut.lengths) == 36
    assert cut.dropped == len(rows) - fitting
    longer = sum(
        len(encode_prompt(tokenizer, row["prompt"]) + encode_response(tokenizer, row["completion"])) > 36
        for row in rows
    )
    assert 0 < cut.cut == longer - cut.dropped


def test_no_fitting_demonstration_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("sft", sft={"max_length": 3}), "sft")
    with pytest.raises(DataError, match=r"sft\.max_length=3"):
        run(stage)


def test_the_held_out_loss_is_that_of_the_completions_of_the_saved_model(finished: Path) -> None:
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    model = load_policy(finished / "models/sft", params().model, tokenizer).eval()
    rows = list(jsonl.plain(finished / "data/prepared/sft/test.jsonl"))
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    sequences = [p + encode_response(tokenizer, row["completion"]) for p, row in zip(prompts, rows, strict=True)]
    logprobs = sequence_logprobs(model, sequences, [len(p) for p in prompts], 1.0, 4096)
    batches = [logprobs[k : k + 8] for k in range(0, len(rows), 8)]
    loss = sum(float(-torch.cat(batch).mean()) * len(batch) for batch in batches) / len(rows)
    assert metrics(finished, "sft")["eval_loss"] == pytest.approx(loss, abs=1e-4)


def test_training_lowers_the_loss_and_reports_its_mean(finished: Path) -> None:
    losses = [row.values["loss"] for row in metric_rows(finished, "sft") if "loss" in row.values]
    assert len(losses) == metrics(finished, "sft")["steps"] == 30
    assert losses[-1] < losses[0] - 1
    assert metrics(finished, "sft")["train_loss"] == pytest.approx(sum(losses) / 30, rel=1e-3)


def test_every_token_of_the_three_epochs_is_accounted_once(finished: Path) -> None:
    stage, _ = open_stage(finished, "sft")
    tokens = sum(len(row["input_ids"]) for row in examples(stage, "train").rows)
    rows = jsonl.read(finished / "runs/sft/usage.jsonl", UsageRow).rows
    assert sum(row.tokens for row in rows if row.phase in ("start", "train")) == 3 * tokens


def test_micro_batches_do_not_change_the_trajectory(project: Project) -> None:
    weights = []
    for micro_batch_size in (8, 2):
        root = project("sft", f"micro-{micro_batch_size}", sft={"max_steps": 8, "micro_batch_size": micro_batch_size})
        work(root, "sft")
        weights.append(load_file(root / "models/sft/model.safetensors"))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=5e-4, rtol=0, msg=name)


@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, finished: Path
) -> None:
    root = project("sft")
    killed_stopped_and_resumed(root, "sft", kill_at=6, stop_at=15)
    assert files(root / "models/sft") == files(finished / "models/sft")
    assert metrics(root, "sft") == metrics(finished, "sft")
    assert (root / "plots/sft.csv").read_bytes() == (finished / "plots/sft.csv").read_bytes()
    assert not list((root / "checkpoints/sft").glob("*/step-*"))
