import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from trl import KTOConfig, KTOTrainer

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
    run_main,
    stop_after_a_step,
    tokenizer,
    work,
)
from training.kto import BucketedKTOTrainer, Logps, judged, rated_logps, row_losses
from training.modeling.models import load_policy
from training.modeling.sequences import logprobs_in_rows
from training.modeling.tokenizer import encode_prompt, encode_response, load_tokenizer
from training.preparation.preferences import read_ratings

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which kto ran to its end."""
    root = tmp_path_factory.mktemp("kto") / "project"
    shutil.copytree(finished, root, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    write(params(), root / "params.yaml")
    work(root, "kto")
    return root


# ---------------------------------------------------------------- rated replies


def test_both_replies_of_a_pair_are_rated_and_beside_each_is_the_reply_to_another_prompt(finished: Path) -> None:
    stage, _ = open_stage(finished, "kto")
    tokenizer = load_tokenizer(finished / "data/tokenizer")
    pairs = list(jsonl.plain(finished / "data/prepared/preference/test.jsonl"))
    ratings = read_ratings(stage, "test")
    expected = [
        (encode_prompt(tokenizer, pair["prompt"]), encode_response(tokenizer, pair[side]), side == "chosen")
        for side in ("chosen", "rejected")
        for pair in pairs
    ]
    assert [(row["prompt_ids"], row["completion_ids"], row["label"]) for row in ratings.rows] == expected
    assert ratings.labels.tolist() == [good for _, _, good in expected]
    assert ratings.lengths.tolist() == [len(prompt) + len(reply) for prompt, reply, _ in expected]
    beside = [row["KL_completion_ids"] for row in ratings.rows]
    assert sorted(beside) == sorted(reply for _, reply, _ in expected)  # each stands beside one other
    assert beside != [reply for _, reply, _ in expected]
    assert list(read_ratings(stage, "test").rows) == list(ratings.rows)


def test_replies_that_are_too_long_are_left_out_and_those_beside_are_cut(project: Project) -> None:
    root = project("kto", kto={"max_length": 40})
    stage, _ = open_stage(root, "kto")
    ratings = read_ratings(stage, "train")
    total = 2 * len((root / "data/prepared/preference/train.jsonl").read_text().splitlines())
    assert 0 < len(ratings.rows) < total
    assert len(ratings.rows) + ratings.too_long == total
    for column in ("completion_ids", "KL_completion_ids"):
        assert max(len(row["prompt_ids"] + row[column]) for row in ratings.rows) <= 40


def trained_on_thumbs(root: Path, rows: list[dict[str, str]], **columns: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of data and kto, run on ratings alone."""
    (root / "thumbs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "score.py").write_text("def score(prompt, reply, row):\n    return 1.0\n")
    source = {"kind": "file", "path": "thumbs.jsonl", "format": "ratings", "columns": columns, "vote": None}
    settings = params(
        data={"source": source, "test_fraction": 0.3, "max_quarantine_fraction": 0.1},
        reward={"kind": "function", "path": "score.py:score", "timeout_seconds": 10.0},
        align={"method": "kto"},
        kto={"max_steps": 2},
    )
    write(settings, root / "params.yaml")
    for stage in ("data", "sft", "kto"):
        assert run_main(root, stage) == 0, stage
    return metrics(root, "data"), metrics(root, "kto")


@pytest.mark.parametrize(("up", "down"), [("👍", "👎"), ("true", "false"), ("1", "-1")])
def test_thumbs_train_without_a_single_pair_and_both_kinds_weigh_the_same(
    tmp_path: Path, finished: Path, up: str, down: str
) -> None:
    rows = list(jsonl.plain(finished / "data/prepared/preference/train.jsonl"))
    thumbs = [
        {"prompt": row["prompt"], "reply": row["chosen" if i % 3 else "rejected"], "rating": up if i % 3 else down}
        for i, row in enumerate(rows)
    ]
    wrong = {**thumbs[0], "rating": "maybe"}
    data, result = trained_on_thumbs(tmp_path, [*thumbs, wrong], completion="reply", label="rating")
    assert (data["quarantined_not_a_rating"], data["rows_quarantined"]) == (1, 1)
    assert data["ratings_train_rows"] == result["train_ratings"]
    assert data["preference_train_rows"] == 0
    assert result["good_replies"] > result["bad_replies"] > 0
    assert result["desirable_weight"] == pytest.approx(result["bad_replies"] / result["good_replies"])
    prepared = list(jsonl.plain(tmp_path / "data/prepared/ratings/train.jsonl"))
    assert {tuple(row) for row in prepared} == {("prompt", "completion", "label")}
    said = {(thumb["prompt"], thumb["reply"]): thumb["rating"] == up for thumb in thumbs}
    assert all(said[row["prompt"], row["completion"]] is row["label"] for row in prepared)


def test_replies_of_one_kind_alone_weigh_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"where is {i}", "completion": f"it is here {i}", "label": "up"} for i in range(40)]
    _, result = trained_on_thumbs(tmp_path, rows)
    assert (result["desirable_weight"], result["bad_replies"], result["accuracy"]) == (1.0, 0, None)


# ---------------------------------------------------------------- formulas


POLICY = Logps(np.array([-10.0, -20.0, -15.0]), np.array([-9.0, -8.0, -10.0]))
REF = Logps(np.array([-12.0, -18.0, -15.0]), np.array([-10.0, -10.0, -10.0]))
"""Rewards of beta times 2, -2 and 0, z of beta times 1."""


def test_the_loss_is_that_of_equation_7() -> None:
    losses = row_losses(POLICY, REF, np.array([True, True, False]), beta=0.5, weight=3.0).sums
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert losses.tolist() == pytest.approx([3 * (1 - sigmoid(0.5)), 3 * (1 - sigmoid(-1.5)), 1 - sigmoid(0.5)])


def test_a_kl_below_zero_counts_as_zero() -> None:
    losses = row_losses(REF, POLICY, np.array([True, True, False]), beta=0.5, weight=1.0).sums
    assert losses[2] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("good", "accuracy", "margin"),
    [([True, False, False], 1.0, 1.5), ([False, True, False], 0.0, -1.5), ([False, False, True], 0.5, 0.0)],
)
def test_accuracy_is_how_often_a_good_reply_has_the_higher_reward(
    good: list[bool], accuracy: float, margin: float
) -> None:
    result = judged(POLICY, REF, np.array(good), beta=0.5, weight=1.0)
    assert (result["accuracy"], result["margin"], result["kl"]) == pytest.approx((accuracy, margin, 1.0))


def test_replies_of_one_kind_have_no_accuracy() -> None:
    result = judged(POLICY, REF, np.array([True, True, True]), beta=0.5, weight=1.0)
    assert (result["accuracy"], result["margin"], result["bad_reward"]) == (None, None, None)


class PlainKTOTrainer(KTOTrainer):
    """TRL's own, on tokenised rows."""

    _prepare_dataset = BucketedKTOTrainer._prepare_dataset
    _precompute_ref_logps = BucketedKTOTrainer._precompute_ref_logps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [1, 2])
def test_loss_and_gradient_of_every_weight_are_those_of_trls_padded_batch(
    family: str, parts: int, tmp_path: Path
) -> None:
    replies = random_responses([3, 1, 7, 2, 9, 4, 1, 1])
    rows = [
        {"prompt_ids": ids, "completion_ids": [*reply, 2], "KL_completion_ids": [*other, 2], "label": i % 3 == 0,
         "ref_logps": -3.0 - i, "ref_KL_logps": -60.0}
        for i, (ids, reply, other) in enumerate(zip(prompts(8), replies, replies[1:] + replies[:1], strict=True))
    ]  # fmt: skip
    result = []
    for kind in (PlainKTOTrainer, BucketedKTOTrainer):
        model = policy(family=family).train()
        trainer = kind(
            model=model,
            args=KTOConfig(
                str(tmp_path), max_length=None, use_cpu=True, report_to="none", bf16=False,
                precompute_ref_log_probs=True, desirable_weight=1.7, beta=0.3,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )  # fmt: skip
        if kind is PlainKTOTrainer:
            value = trainer.compute_loss(model, trainer.data_collator(rows))
        else:
            logprobs_in_rows(model)
            size = len(rows) // parts
            batches = [trainer.data_collator(rows[i : i + size]) for i in range(0, len(rows), size)]
            items = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
            value = sum(trainer.compute_loss(model, batch, num_items_in_batch=items) for batch in batches)
        value.backward()
        said = {name: trainer._metrics["train"][name][0] for name in ("kl", "rewards/chosen", "rewards/rejected")}
        result.append((value.detach(), {name: p.grad for name, p in model.named_parameters()}, said))
    (theirs, expected, trl), (ours, gradients, by_ours) = result
    assert trl["kl"] > 1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert by_ours["kl"] == pytest.approx(trl["kl"], rel=1e-5)
    if parts == 1:
        assert by_ours == pytest.approx(trl, rel=1e-4, abs=1e-5)
    for name, gradient in expected.items():
        atol = 2e-6 * max(1.0, float(gradient.abs().max()))  # a sum rounds as its largest terms do
        torch.testing.assert_close(gradients[name], gradient, atol=atol, rtol=1e-4, msg=name)


def test_the_first_loss_is_that_of_a_policy_that_is_its_own_reference(project: Project) -> None:
    root = project("kto", kto={"max_steps": 1, "desirable_weight": 3.0})
    work(root, "kto")
    values = metric_rows(root, "kto")[0].values
    assert 0.5 < values["loss"] < 1.5
    good = (values["loss"] / 0.5 - 1) / 2 * params().kto.batch_size
    assert good == pytest.approx(round(good), abs=1e-3)
    assert (values["margin"], values["kl"]) == pytest.approx((0.0, 0.0), abs=1e-4)
    assert metrics(root, "kto")["desirable_weight"] == 3.0


# ---------------------------------------------------------------- training


def test_training_raises_the_margin_of_held_out_replies(undisturbed: Path) -> None:
    result = metrics(undisturbed, "kto")
    assert result["margin"] > 0.05
    assert result["accuracy"] > 0.5
    assert (result["good_replies"], result["desirable_weight"]) == (result["bad_replies"], 1.0)
    rows = [row.values["margin"] for row in metric_rows(undisturbed, "kto") if "margin" in row.values]
    assert sum(rows[-5:]) / 5 > sum(rows[:5]) / 5 + 0.2


def test_the_figures_are_those_of_the_saved_model_against_sft(undisturbed: Path) -> None:
    stage, _ = open_stage(undisturbed, "kto")
    tokenizer = load_tokenizer(undisturbed / "data/tokenizer")
    ratings = read_ratings(stage, "test")
    with torch.no_grad():
        policy, ref = (
            rated_logps(load_policy(undisturbed / "models" / name, params().model, tokenizer).eval(), ratings, stage)
            for name in ("kto", "sft")
        )
    expected = judged(policy, ref, ratings.labels, params().kto.beta, 1.0)
    result = metrics(undisturbed, "kto")
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_every_token_is_accounted_in_the_phase_that_read_it(undisturbed: Path) -> None:
    stage, _ = open_stage(undisturbed, "kto")

    def tokens(split: str, *columns: str) -> int:
        """With what both sequences of a row begin with once."""
        sequences = ([row["prompt_ids"] + row[name] for name in columns] for row in read_ratings(stage, split).rows)
        return sum(len({tuple(ids[: n + 1]) for ids in both for n in range(len(ids))}) for both in sequences)

    both = ("completion_ids", "KL_completion_ids")
    rows = jsonl.read(undisturbed / "runs/kto/usage.jsonl", UsageRow).rows
    spent = {
        phase: sum(row.tokens for row in rows if row.phase == phase) for phase in ("reference", "train", "evaluate")
    }
    assert spent == {
        "reference": tokens("train", *both) + tokens("test", *both),
        "train": 3 * tokens("train", "completion_ids"),
        "evaluate": tokens("test", *both),
    }


def test_micro_batches_do_not_change_the_trajectory(project: Project) -> None:
    weights = []
    for micro_batch_size in (8, 2, 1):
        root = project("kto", f"micro-{micro_batch_size}", kto={"max_steps": 4, "micro_batch_size": micro_batch_size})
        work(root, "kto")
        weights.append(load_file(root / "models/kto/model.safetensors"))
    for others in weights[1:]:
        for name, weight in weights[0].items():
            torch.testing.assert_close(others[name], weight, atol=5e-4, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_killed_and_stopped_on_its_way_ends_with_the_bits_of_the_undisturbed_one(
    project: Project, undisturbed: Path
) -> None:
    root = project("kto")
    killed_stopped_and_resumed(root, "kto", kill_at=6, stop_at=15)
    assert files(root / "models/kto") == files(undisturbed / "models/kto")
    assert metrics(root, "kto") == metrics(undisturbed, "kto")
    assert (root / "plots/kto.csv").read_bytes() == (undisturbed / "plots/kto.csv").read_bytes()


def test_an_adapter_learns_on_the_sft_model_and_resumes_to_the_bit(project: Project) -> None:
    lora = {"rank": 4, "alpha": 8.0, "modules": ["q", "v", "up"], "dropout": 0.1}
    changes = {"lora": lora, "max_steps": 15, "learning_rate": 1.2e-2}
    straight, interrupted = (project("kto", name, kto=changes) for name in ("straight", "interrupted"))
    work(straight, "kto")
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(names(straight / "models/kto"))
    stop_after_a_step(interrupted, "kto")
    work(interrupted, "kto")
    assert files(interrupted / "models/kto") == files(straight / "models/kto")
    assert metrics(interrupted, "kto") == metrics(straight, "kto")


# ---------------------------------------------------------------- bad input


def test_no_fitting_reply_is_a_mistake_of_the_user(project: Project) -> None:
    stage, run = open_stage(project("kto", kto={"max_length": 3}), "kto")
    with pytest.raises(DataError, match=r"kto\.max_length=3"):
        run(stage)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 8, "micro_batch_size": 3}, r"kto\.batch_size=8 does not split into kto\.micro_batch_size=3"),
        ({"max_length": 97}, r"kto\.max_length=97 does not fit in model\.context_length=96"),
        ({"desirable_weight": 0.0}, r"kto\.desirable_weight=0\.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(changes: dict, said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        params(kto=changes, align={"method": "kto"})
