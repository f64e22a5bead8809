"""Stage `dpo`: direct preference optimisation of the SFT model, from the preference pairs alone.

data/prepared/preference/, models/sft -> models/dpo, metrics/dpo.json, plots/dpo.csv

The reference's log-probs are computed once, with the SFT weights that the policy starts from: no second model is held
in memory, and a step saves a forward pass. Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7.

Shapes: B pairs.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from config.methods.dpo import Dpo
from training.distributed.sharding import unsharded
from training.evaluation.intervals import wilson
from training.evaluation.overfitting import RowLosses, calibrated, pair_losses
from training.hf.checkpoints import TrainedCheckpoints
from training.hf.offline import Tokenised, load_from_sft, reply_logps, save_aligned, with_reference
from training.hf.pair_loss import PairCountingCollator, PairLoss
from training.hf.trainer import BucketedData, CountingCollator, OurNames, StageCallback, arguments, train
from training.hf.validation import Validation, has_validation
from training.modeling.packing import shares_prefix
from training.modeling.sequences import logprobs_in_pairs
from training.modeling.tokenizer import load_tokenizer
from training.preparation.preferences import read_pairs
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.run import run_stage
from training.process.stage import Stage
from training.process.usage import Work

SECTIONS = ("seed", "model", "dpo")
INPUTS = ("data/prepared/preference", "data/tokenizer", "models/sft")


class Logps(NamedTuple):
    """Log-probability of each reply, summed over its tokens, [B]."""

    chosen: Tensor
    rejected: Tensor


class BucketedDPOTrainer(PairLoss, BucketedData, TrainedCheckpoints, OurNames, Tokenised, DPOTrainer):
    """TRL's trainer on tokenised pairs with reference log-probs, in batches of similar length."""

    names: ClassVar[dict[str, str]] = {
        "rewards/margins": "margin",
        "rewards/accuracies": "accuracy",
        "rewards/chosen": "chosen_reward",
        "rewards/rejected": "rejected_reward",
        "logps/chosen": "chosen_logps",
        "logps/rejected": "rejected_logps",
        "entropy": "entropy",
    }
    pair_means: ClassVar[tuple[str, ...]] = tuple(name for name in names if name != "entropy")


def dpo(stage: Stage) -> None:
    params = stage.params
    settings: Dpo = params.section("dpo")
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    splits = ("train", "test", *(("validation",) if has_validation(stage, "preference") else ()))
    pairs = {split: read_pairs(stage, split) for split in splits}
    model = load_from_sft(stage, settings, tokenizer)
    with stage.meter.phase("reference", 0) as work:
        ref = {split: pair_replies(model, pairs[split].rows, stage, work) for split in pairs}
    collator = (PairCountingCollator if shares_prefix(model) else CountingCollator)(
        DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id)
    )
    validation = None
    if "validation" in pairs:

        def losses(model: PreTrainedModel, split: str) -> RowLosses:
            policy = pair_replies(model, pairs[split].rows, stage)
            return pair_losses(margins(policy, ref[split], settings.beta).numpy())

        validation = Validation(stage, settings.keep, settings.checkpoint_every_steps, losses)
    filler: dict[str, Any] = {
        "prompt_ids": [],
        "chosen_ids": [tokenizer.eos_token_id],
        "rejected_ids": [tokenizer.eos_token_id],
    }
    filler |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
    trainer = BucketedDPOTrainer(
        model=model,
        args=DPOConfig(
            **arguments(stage, settings),
            beta=settings.beta,
            loss_type=[settings.loss],
            label_smoothing=settings.label_smoothing,
            max_length=None,
            precompute_ref_log_probs=True,
            disable_dropout=False,  # the model has none but its adapter's
        ),
        data_collator=collator,
        train_dataset=Dataset.from_list([filler]),  # TRL wants one; `bucket` gives the rows
        processing_class=tokenizer,
        callbacks=[StageCallback(stage, collator, validation)],
    )
    logprobs_in_pairs(model)
    trainer.loss_is_scaled_for_ga = True
    if settings.loss == "ipo":
        trainer.filler_loss = 1 / (2 * settings.beta) ** 2
    rows = with_reference(
        pairs["train"].rows, ref_chosen_logps=ref["train"].chosen, ref_rejected_logps=ref["train"].rejected
    )
    trainer.bucket(rows, pairs["train"].lengths, filler, settings)
    train(trainer, stage)
    chosen = validation.finish(trainer.model) if validation is not None else {}
    model, step = trainer.model.eval(), trainer.state.global_step
    with stage.meter.phase("evaluate", step) as work, unsharded(model):
        held_out = pair_replies(model, pairs["test"].rows, stage, work)
        if validation is not None:
            policy = pair_replies(model, pairs["validation"].rows, stage)
            chosen |= calibrated(
                margins(policy, ref["validation"], settings.beta).numpy(),
                margins(held_out, ref["test"], settings.beta).numpy(),
            )
    stage.check_params()
    with stage.meter.phase("save", step):
        save_aligned(stage, settings, model, tokenizer)
        if stage.rank != 0:
            return
        write_curves(
            stage,
            "plots/dpo.csv",
            ("loss", "accuracy", "margin", "chosen_logps", "rejected_logps", "learning_rate", "grad_norm"),
        )
        metrics = {
            **judged(held_out, ref["test"], settings.beta),
            "test_pairs": len(pairs["test"].rows), "train_pairs": len(pairs["train"].rows),
            "pairs_too_long": pairs["train"].too_long + pairs["test"].too_long,
            "steps": step, "parameters": model.num_parameters(),
            "learning_parameters": model.num_parameters(only_trainable=True),
            **chosen,
        }  # fmt: skip
        write_json(stage.root / "metrics/dpo.json", metrics)
    stage.finish("models/dpo", "metrics/dpo.json", "plots/dpo.csv")


def pair_replies(
    model: PreTrainedModel, rows: Sequence[dict[str, list[int]]], stage: Stage, work: Work | None = None
) -> Logps:
    """Log-probability of every chosen and rejected reply under `model`; `work` counts the tokens read."""
    at_once = 4 * stage.params.section("dpo").micro_batch_size
    return Logps(*reply_logps(model, rows, ("chosen_ids", "rejected_ids"), stage, at_once, work))


def margins(policy: Logps, ref: Logps, beta: float) -> Tensor:
    """beta ((log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))), [B].

    The implicit reward of the chosen reply minus that of the rejected one. Source: arXiv:2305.18290, equation 7.
    """
    return beta * ((policy.chosen - policy.rejected) - (ref.chosen - ref.rejected))


def judged(policy: Logps, ref: Logps, beta: float) -> dict[str, float]:
    """Metrics on held-out pairs. Changes are in nats per reply; if the chosen reply's falls too, the model becomes
    less likely to produce it.
    """
    margins_B = margins(policy, ref, beta)
    accuracy = float((margins_B > 0).double().mean())
    _, low, high = wilson(accuracy * len(margins_B), len(margins_B))
    return {
        "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high,
        "margin": float(margins_B.mean()),
        "eval_loss": float(-torch.nn.functional.logsigmoid(margins_B).mean()),
        "chosen_logps_change": float((policy.chosen - ref.chosen).mean()),
        "rejected_logps_change": float((policy.rejected - ref.rejected).mean()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_stage("dpo", SECTIONS, INPUTS, dpo))
