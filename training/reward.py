"""Stage `reward`: a reward model of the preference pairs, Bradley-Terry; where reward.kind is function, a check of
that function (training/rewards).

data/prepared/preference/, models/sft -> models/reward, metrics/reward.json, plots/reward.csv,
plots/reward_calibration.csv
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from config.errors import TrainingDiverged
from config.inputs import reward_files
from config.schema import Params
from config.sections.offline import Reward
from config.work import NORMALISATION_PAIRS
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.distributed.sharding import unsharded
from training.evaluation.intervals import wilson
from training.evaluation.overfitting import calibrated, pair_losses
from training.evaluation.reliability import expected_calibration_error, pair_accuracy, reliability
from training.hf.checkpoints import TrainedCheckpoints
from training.hf.pair_loss import PairCollator, PairCountingCollator, PairLoss
from training.hf.trainer import BucketedData, CountingCollator, StageCallback, arguments, train
from training.hf.validation import Validation, has_validation
from training.modeling.adapter_base import named_base
from training.modeling.adapters import train_only_adapter
from training.modeling.batching import shared_length
from training.modeling.layers import with_layers
from training.modeling.models import autocast, base_model, load_policy, new_reward_model
from training.modeling.packing import shares_prefix
from training.modeling.scoring import raw_pair_scores, score_in_pairs
from training.modeling.tokenizer import load_tokenizer
from training.preparation.preferences import Pairs, read_pairs
from training.process.artifacts import write_csv, write_json
from training.process.curves import write_curves
from training.process.out_of_memory import OomBackoff
from training.process.run import run_stage
from training.process.stage import Stage
from training.rewards.check import check_function

SECTIONS = ("seed", "model", "reward")
OF_DATA = ("bayes_accuracy", "baseline_longer_wins", "baseline_bow")
"""Keys of metrics/data.json that the stage reads; DVC compares them."""


def inputs(params: Params) -> tuple[str, ...]:
    script_inputs = ("data/prepared/prompts/test.jsonl", *reward_files(Path(), params))
    return (
        "data/prepared/preference",
        "data/tokenizer",
        "models/sft",
        "metrics/data.json",
        *(script_inputs if params.trained_reward is None else ()),
    )


INPUTS = inputs


class BucketedRewardTrainer(PairLoss, BucketedData, TrainedCheckpoints, RewardTrainer):
    """TRL's trainer with batches of similar length."""

    pair_means: ClassVar[tuple[str, ...]] = ("accuracy", "margin")


def reward(stage: Stage) -> None:
    settings = stage.params.trained_reward
    if settings is None:
        check_function(stage, data_limits(stage.root / "metrics/data.json"))
        return
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    train_pairs, test_pairs = (read_sequences(stage, split) for split in ("train", "test"))
    model = untrained(stage, tokenizer)
    score_in_pairs(model)
    once = shares_prefix(model)
    collator = (PairCountingCollator if once else CountingCollator)(PairCollator(tokenizer.pad_token_id))
    validation, checked = None, {"test": test_pairs.rows}
    if has_validation(stage, "preference"):
        checked["validation"] = read_sequences(stage, "validation").rows
        budget = 4 * settings.micro_batch_size * settings.max_length
        validation = Validation(
            stage, settings.keep, settings.checkpoint_every_steps,
            lambda model, split: pair_losses(margins(model, checked[split], budget)),
        )  # fmt: skip
    filler = {name: [tokenizer.eos_token_id] for name in ("chosen_ids", "rejected_ids")}
    trainer = BucketedRewardTrainer(
        model=model,
        # dropout stays on: the model has none but its adapter's
        args=RewardConfig(**arguments(stage, settings), max_length=None, disable_dropout=False),
        data_collator=collator,
        train_dataset=Dataset.from_list([filler]),  # TRL wants one; `bucket` gives the rows
        processing_class=tokenizer,
        callbacks=[StageCallback(stage, collator, validation)],
    )
    trainer.loss_is_scaled_for_ga = True
    trainer.bucket(train_pairs.rows, train_pairs.lengths, filler, settings)
    train(trainer, stage)
    chosen = validation.finish(trainer.model) if validation is not None else {}
    model = trainer.model.eval()
    step = trainer.state.global_step
    oom = OomBackoff(stage, "tokens scored at once", 4 * settings.micro_batch_size * settings.max_length)
    with stage.meter.phase("evaluate", step) as work, unsharded(model), autocast(stage.params.model, model.device):
        held_out = oom.run(partial(margins, model, test_pairs.rows), step)
        if validation is not None:
            validation_margins = oom.run(partial(margins, model, checked["validation"]), step)
            chosen |= calibrated(validation_margins, held_out)
        work.add(
            tokens=sum(
                len(first) + len(second) - once * shared_length(first, second)
                for first, second in as_tuples(test_pairs.rows)
            ),
            sequences=2 * len(held_out),
        )
        oom.run(partial(store_normalisation, model, train_pairs.rows[:NORMALISATION_PAIRS], settings.normalise), step)
    bins = reliability(held_out)
    stage.check_params()
    with stage.meter.phase("save", trainer.state.global_step):
        with replacing_on_rank0(stage.root / "models/reward") as folder:
            if settings.lora is None:
                save_model(folder, model)
            else:
                start, revision = start_of(stage)
                base = named_base(start, stage.root / "models/reward", revision)
                save_adapter(folder, model, "reward", *base, model.score)
            if stage.rank != 0:
                return
            tokenizer.save_pretrained(folder)
        write_curves(stage, "plots/reward.csv", ("loss", "accuracy", "margin", "learning_rate", "grad_norm"))
        write_csv(stage.root / "plots/reward_calibration.csv", ("confidence", "accuracy", "count"), bins)
        accuracy = pair_accuracy(held_out)
        _, low, high = wilson(accuracy * len(held_out), len(held_out))
        metrics = {
            "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high,
            "ece": expected_calibration_error(bins),
            **data_limits(stage.root / "metrics/data.json"),
            "margin_mean": float(held_out.mean()),
            "score_mean": model.config.score_mean, "score_std": model.config.score_std,
            "test_pairs": len(held_out), "train_pairs": len(train_pairs.rows),
            "pairs_too_long": train_pairs.too_long + test_pairs.too_long,
            "steps": trainer.state.global_step, "parameters": model.num_parameters(),
            "learning_parameters": model.num_parameters(only_trainable=True),
            **chosen,
        }  # fmt: skip
        write_json(stage.root / "metrics/reward.json", metrics)
    stage.finish("models/reward", "metrics/reward.json", "plots/reward.csv", "plots/reward_calibration.csv")


def trained_reward(stage: Stage) -> Reward:
    """The settings of the reward model that the stage trains."""
    settings = stage.params.trained_reward
    assert settings is not None
    return settings


def start_of(stage: Stage) -> tuple[Path | str, str | None]:
    """The model that training starts from and its revision; None for model.random."""
    model = stage.params.model
    if trained_reward(stage).init == "sft":
        return stage.root / "models/sft", None
    return str(model.path), model.revision


def untrained(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model to train: all of it, or with reward.lora an adapter and the head."""
    params, settings = stage.params, trained_reward(stage)
    lora, kept = settings.lora, settings.layers
    random = settings.init == "base" and params.model.random is not None
    start, revision = start_of(stage)
    if random or kept is not None:
        trunk = (
            base_model(params.model, tokenizer, params.seed, trainable=True)
            if random
            else load_policy(start, params.model, tokenizer, trainable=True, revision=revision)
        )
        if kept is not None:
            trunk = with_layers(trunk, kept, "reward.layers")
        return new_reward_model(trunk, params.model, tokenizer, params.seed)
    if lora is None:
        return new_reward_model(start, params.model, tokenizer, params.seed, trainable=True, revision=revision)
    model = new_reward_model(start, params.model, tokenizer, params.seed, False, revision, adapter=None)
    train_only_adapter(model, lora, "reward", params.seed, start)
    model.score.requires_grad_(True)
    return model


def read_sequences(stage: Stage, split: str) -> Pairs:
    """The pairs of a split, prompt and reply as one sequence each: {chosen_ids, rejected_ids}.

    Raises DataError if none is left.
    """
    pairs = read_pairs(stage, split)
    return pairs._replace(
        rows=pairs.rows.map(
            lambda row: {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")}
        )
    )


def margins(model: PreTrainedModel, rows: Sequence[dict[str, list[int]]], budget_tokens: int) -> NDArray[np.float64]:
    """Chosen minus rejected raw score of each pair, [B]."""
    scores_B2 = raw_pair_scores(model, as_tuples(rows), budget_tokens).double().numpy()
    result: NDArray[np.float64] = scores_B2[:, 0] - scores_B2[:, 1]
    return result


def store_normalisation(
    model: PreTrainedModel, rows: Sequence[dict[str, list[int]]], normalise: bool, budget_tokens: int
) -> None:
    """Store mean and standard deviation of the training scores in the model's config, from which every scorer reads
    them.

    Raises TrainingDiverged if all scores are equal or not finite.
    """
    scores_B2 = raw_pair_scores(model, as_tuples(rows), budget_tokens)
    mean, std = float(scores_B2.mean()), float(scores_B2.std())
    if not std > 0 or not np.isfinite(mean):
        raise TrainingDiverged(
            f"the reward model gives mean {mean} and deviation {std} on its training replies: "
            "it cannot tell them apart. Lower reward.learning_rate or raise reward.epochs in params.yaml."
        )
    model.config.score_mean, model.config.score_std = (mean, std) if normalise else (0.0, 1.0)


def as_tuples(rows: Sequence[dict[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """The two sequences of each pair."""
    return [(row["chosen_ids"], row["rejected_ids"]) for row in rows]


def data_limits(path: Path) -> dict[str, Any]:
    """Facts of the data stage about the held-out pairs: the Bayes limit if known, and trivial baselines."""
    metrics = json.loads(path.read_text(encoding="utf-8"))
    return {name: metrics[name] for name in OF_DATA}


if __name__ == "__main__":
    sys.exit(run_stage("reward", SECTIONS, INPUTS, reward))
