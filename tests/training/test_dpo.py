import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from trl import DPOConfig

from config import jsonl
from config.errors import DataError, ParamsError
from config.load import write
from config.records import UsageRow
from tests.training.support.processes import killed_stopped_and_resumed, metric_rows, metrics
from tests.training.support.tiny import (
    FAMILIES,
    files,
    names,
    open_stage,
    params,
    policy,
    prompts,
    random_responses,
    stop_after_a_step,
    tokenizer,
    work,
)
from training.dpo import BucketedDPOTrainer, Logps, judged, margins, pair_replies
from training.modeling.models import load_policy
from training.modeling.sequences import logprobs_in_pairs, pair_logps, sequence_logprobs
from training.modeling.tokenizer import encode_prompt, encode_response, load_tokenizer
from training.preparation.preferences import read_pairs

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which dpo ran to its end."""
    root = tmp_path_factory.mktemp("dpo") / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    write(params(), root / "params.yaml")
    work(root, "dpo")
    return root


# ---------------------------------------------------------------- pairs


def test_pairs_are_a_prompt_and_two_replies_that_end(finished: Path) -> None:
    stage, _ = open_stage(finished, "dpo")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    rows = list(jsonl.plain(finished / "data/prepared/preference/test.jsonl"))
    pairs = read_pairs(stage, "test")
    assert pairs.too_long == 0
    for row, pair in zip(rows, pairs.rows, strict=True):
        assert pair["prompt_ids"] == encode_prompt(tokenizer, row["prompt"])
        assert pair["chosen_ids"] == encode_response(tokenizer, row["chosen"])
        assert pair["rejected_ids"] == encode_response(tokenizer, row["rejected"])


def test_pairs_that_are_too_long_are_left_out_and_counted(project: Project) -> None:
    root = project("dpo", dpo={"max_length": 50})
    stage, _ = open_stage(root, "dpo")
    pairs = read_pairs(stage, "train")
    total = len((root / "data/prepared/preference/train.jsonl").read_text().splitlines())
    assert 0 < len(pairs.rows) < total
    assert len(pairs.rows) + pairs.too_long == total
    assert (
        max(len(row["prompt_ids"] + row[side]) for row in pairs.rows for side in ("chosen_ids", "rejected_ids")) <= 50
    )


# ---------------------------------------------------------------- formulas


def test_the_margin_is_beta_times_what_the_chosen_reply_gained_over_the_other() -> None:
    policy = Logps(torch.tensor([-10.0, -20.0]), torch.tensor([-15.0, -20.0]))
    ref = Logps(torch.tensor([-12.0, -18.0]), torch.tensor([-14.0, -21.0]))
    # gained by chosen 2 and -2, by rejected -1 and 1
    assert margins(policy, ref, 0.5).tolist() == [1.5, -1.5]
    result = judged(policy, ref, 0.5)
    assert result["accuracy"] == 0.5
    assert (result["chosen_logps_change"], result["rejected_logps_change"], result["margin"]) == (0.0, 0.0, 0.0)
    assert result["eval_loss"] == pytest.approx((math.log1p(math.exp(-1.5)) + math.log1p(math.exp(1.5))) / 2)


def test_reply_logps_are_those_of_the_reply_alone_after_its_prompt(finished: Path) -> None:
    stage, _ = open_stage(finished, "dpo")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    model = load_policy(finished / "models/sft", params().model, tokenizer).eval()
    rows = read_pairs(stage, "test").rows
    with torch.no_grad():
        result = pair_replies(model, rows, stage)
        for i, row in enumerate(rows[:4]):
            for side, value in (("chosen_ids", result.chosen[i]), ("rejected_ids", result.rejected[i])):
                ids = torch.tensor([row["prompt_ids"] + row[side]])
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])
                assert float(value) == pytest.approx(float(logprobs[len(row["prompt_ids"]) - 1 :].sum()), abs=1e-3)


@pytest.mark.parametrize(("loss", "first"), [("sigmoid", math.log(2)), ("robust", math.log(2)), ("ipo", 25.0)])
def test_the_first_loss_is_that_of_a_policy_that_is_its_own_reference(
    project: Project, loss: str, first: float
) -> None:
    changes = {"max_steps": 1, "loss": loss, "label_smoothing": 0.1 if loss == "robust" else 0.0, "beta": 0.1}
    root = project("dpo", dpo=changes)
    work(root, "dpo")
    values = metric_rows(root, "dpo")[0].values
    assert values["loss"] == pytest.approx(first, rel=1e-4)
    assert values["margin"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", ["sigmoid", "robust", "ipo"])
@pytest.mark.parametrize("same_prompt", [False, True])
def test_loss_and_gradient_of_every_weight_are_those_of_trls_padded_batch(
    family: str, loss: str, same_prompt: bool, tmp_path: Path
) -> None:
    pair_prompts = [prompts(1)[0]] * 6 if same_prompt else prompts(6)
    replies = random_responses([3, 1, 7, 2, 9, 4, 1, 1, 5, 5, 2, 8])
    replies[4][:4] = replies[5][:4]
    rows = [
        {"prompt_ids": ids, "chosen_ids": [*chosen, 2], "rejected_ids": [*rejected, 2],
         "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0}
        for ids, chosen, rejected in zip(pair_prompts, replies[::2], replies[1::2], strict=True)
    ]  # fmt: skip
    model = policy(family=family).train()
    trainer = BucketedDPOTrainer(
        model=model,
        args=DPOConfig(
            str(tmp_path), max_length=None, use_cpu=True, report_to="none", bf16=False,
            precompute_ref_log_probs=True, loss_type=[loss], label_smoothing=0.1, beta=0.3,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )  # fmt: skip
    result = []
    for once in (False, True):
        if once:
            logprobs_in_pairs(model)
        model.zero_grad()
        trainer._metrics["train"].clear()
        value = trainer.compute_loss(model, trainer.data_collator(rows))
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        said = {name: trainer._metrics["train"][name][0] for name in BucketedDPOTrainer.names}
        result.append((value.detach(), gradients, said))
    (theirs, expected, trl), (ours, gradients, by_ours) = result
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert by_ours == pytest.approx(trl, rel=1e-4, abs=1e-5)
    for name, gradient in expected.items():
        atol = 2e-6 * max(1.0, float(gradient.abs().max()))  # a sum rounds as its largest terms do
        torch.testing.assert_close(gradients[name], gradient, atol=atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize("budget_tokens", [1, 150, 100_000])
def test_logps_of_pairs_are_those_of_each_sequence_alone(budget_tokens: int) -> None:
    model, pair_prompts = policy(), prompts(4)
    replies = random_responses([3, 1, 7, 2, 9, 4, 1, 1])
    pairs = [
        ([*ids, *first], [*ids, *second])
        for ids, first, second in zip(pair_prompts, replies[::2], replies[1::2], strict=True)
    ]
    lengths = [len(ids) for ids in pair_prompts]
    alone = sequence_logprobs(
        model, [ids for pair in pairs for ids in pair], [n for n in lengths for _ in "12"], 1.0, 999
    )
    sums = torch.stack([item.double().sum() for item in alone]).view(-1, 2)
    torch.testing.assert_close(pair_logps(model, pairs, lengths, budget_tokens), sums, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- training


def test_training_raises_the_margin_of_held_out_pairs(undisturbed: Path) -> None:
    result = metrics(undisturbed, "dpo")
    assert result["margin"] > 0.05
    assert result["accuracy_low"] < result["accuracy"] < result["accuracy_high"]
    rows = [row.values for row in metric_rows(undisturbed, "dpo") if "margin" in row.values]
    assert len(rows) == result["steps"]
    assert sum(row["margin"] for row in rows[-5:]) / 5 > 0.5


def test_the_figures_are_those_of_the_saved_model_against_sft(undisturbed: Path) -> None:
    stage, _ = open_stage(undisturbed, "dpo")
    tokenizer = load_tokenizer(undisturbed / "data/tokenizer")
    rows = read_pairs(stage, "test").rows
    with torch.no_grad():
        policy, ref = (
            pair_replies(load_policy(undisturbed / "models" / name, params().model, tokenizer).eval(), rows, stage)
            for name in ("dpo", "sft")
        )
    expected = judged(policy, ref, params().dpo.beta)
    result = metrics(undisturbed, "dpo")
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_every_token_is_accounted_in_the_phase_that_read_it(undisturbed: Path) -> None:
    stage, _ = open_stage(undisturbed, "dpo")
    tokens = {
        split: sum(
            len(
                {
                    tuple(ids[: n + 1])
                    for side in ("chosen_ids", "rejected_ids")
                    for ids in [row["prompt_ids"] + row[side]]
                    for n in range(len(ids))
                }
            )
            for row in read_pairs(stage, split).rows
        )
        for split in ("train", "test")
    }
    rows = jsonl.read(undisturbed / "runs/dpo/usage.jsonl", UsageRow).rows
    spent = {
        phase: sum(row.tokens for row in rows if row.phase == phase) for phase in ("reference", "train", "evaluate")
    }
    assert spent == {
        "reference": tokens["train"] + tokens["test"],
        "train": 3 * tokens["train"],
        "evaluate": tokens["test"],
    }


def test_micro_batches_do_not_change_the_trajectory(project: Project) -> None:
    weights = []
    for micro_batch_size in (8, 2):
        root = project("dpo", f"micro-{micro_batch_size}", dpo={"max_steps": 4, "micro_batch_size": micro_batch_size})
        work(root, "dpo")
        weights.append(load_file(root / "models/dpo/model.safetensors"))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=5e-4, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, undisturbed: Path
) -> None:
    root = project("dpo")
    killed_stopped_and_resumed(root, "dpo", kill_at=6, stop_at=15)
    assert files(root / "models/dpo") == files(undisturbed / "models/dpo")
    assert metrics(root, "dpo") == metrics(undisturbed, "dpo")
    assert (root / "plots/dpo.csv").read_bytes() == (undisturbed / "plots/dpo.csv").read_bytes()
    assert not list((root / "checkpoints/dpo").glob("*/step-*"))


def test_an_adapter_learns_on_the_sft_model_which_is_its_reference(project: Project) -> None:
    lora = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "up"], "dropout": 0.0}
    changes = {"lora": lora, "max_steps": 15, "learning_rate": 1.2e-2}
    straight, interrupted = (project("dpo", name, dpo=changes) for name in ("straight", "interrupted"))
    work(straight, "dpo")
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(names(straight / "models/dpo"))
    assert "model.safetensors" not in names(straight / "models/dpo")
    losses = [row.values["loss"] for row in metric_rows(straight, "dpo") if "loss" in row.values]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.01
    result = metrics(straight, "dpo")
    assert result["learning_parameters"] < result["parameters"] / 4
    stop_after_a_step(interrupted, "dpo")
    work(interrupted, "dpo")
    assert files(interrupted / "models/dpo") == files(straight / "models/dpo")
    assert metrics(interrupted, "dpo") == result


# ---------------------------------------------------------------- bad input


def test_no_fitting_pair_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("dpo", dpo={"max_length": 3}), "dpo")
    with pytest.raises(DataError, match=r"dpo\.max_length=3"):
        run(stage)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 8, "micro_batch_size": 3}, r"dpo\.batch_size=8 does not split into dpo\.micro_batch_size=3"),
        ({"label_smoothing": 0.1}, r"dpo\.label_smoothing=0\.1 has no effect with dpo\.loss=sigmoid"),
        ({"max_length": 97}, r"dpo\.max_length=97 does not fit in model\.context_length=96"),
        ({"beta": 0.0}, r"dpo\.beta=0\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(changes: dict, said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        params(dpo=changes, align={"method": "dpo"})
