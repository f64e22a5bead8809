"""Stage `kto`: Kahneman-Tversky optimisation of the SFT model, from replies that are good or bad.

data/prepared/ratings and preference/, models/sft -> models/kto, metrics/kto.json, plots/kto.csv

    reward = beta (log pi(reply) - log ref(reply))
    z      = beta max(0, mean of log pi(y') - log ref(y') over replies y' to other prompts)
    loss   = w (1 - sigmoid(reward - z)) of a good reply, 1 - sigmoid(z - reward) of a bad one

z is an estimate of beta KL(pi || ref), and takes no gradient. Source: Ethayarajh et al. 2024 (arXiv:2402.01306),
equations 7 and 8. The paper and TRL estimate it in each micro-batch; here it is of the whole batch, so that neither
micro-batches nor processes change the result.

Shapes: B rated replies.
"""

import logging
import sys
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor
from transformers import PreTrainedModel
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from config.methods.kto import Kto
from training.distributed import collectives
from training.distributed.sharding import unsharded
from training.evaluation.overfitting import RowLosses
from training.hf.checkpoints import TrainedCheckpoints
from training.hf.offline import Tokenised, load_from_sft, reply_logps, save_aligned, with_reference
from training.hf.pair_loss import PairLoss
from training.hf.trainer import BucketedData, CountingCollator, OurNames, StageCallback, arguments, real_rows, train
from training.hf.validation import Validation, has_validation
from training.modeling.sequences import IGNORED, logprobs_in_rows
from training.modeling.tokenizer import load_tokenizer
from training.preparation.preferences import Ratings, read_ratings
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.run import run_stage
from training.process.stage import Stage
from training.process.usage import Work

logger = logging.getLogger("training.kto")  # as a process this module is called __main__

SECTIONS = ("seed", "model", "kto")
INPUTS = ("data/prepared/ratings", "data/prepared/preference", "data/tokenizer", "models/sft")


class Logps(NamedTuple):
    """Log-probability of each rated reply, and of the reply to another prompt beside it, [B] in fp64."""

    rated: NDArray[np.float64]
    mismatched: NDArray[np.float64]


class BucketedKTOTrainer(PairLoss, BucketedData, TrainedCheckpoints, OurNames, Tokenised, KTOTrainer):
    """TRL's trainer on tokenised replies with reference log-probs, in batches of similar length, each with one KL."""

    names: ClassVar[dict[str, str]] = {
        "rewards/margins": "margin",
        "rewards/chosen": "good_reward",
        "rewards/rejected": "bad_reward",
        "kl": "kl",
        "entropy": "entropy",
    }
    item_sequences: ClassVar[int] = 1
    pair_means: ClassVar[tuple[str, ...]] = ()
    batch_kl: Tensor
    """mean(log pi(y') - log ref(y')) over the mismatched replies of the current batch, not clamped."""

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int:
        """Rated replies of the batch over micro-batches and processes, after estimating the batch's KL. Collective.

        Without dropout, so that no random number is drawn: the Trainer restores their state after this.
        """
        self.model.eval()
        total = sum((self._mismatched_gain(batch) for batch in batch_samples), 0.0)
        self.model.train()
        items = super()._get_num_items_in_batch(batch_samples, device)
        self.batch_kl = torch.tensor(collectives.all_reduce_sum([total])[0] / items, device=self.accelerator.device)
        return items

    @torch.no_grad()
    def _mismatched_gain(self, batch: dict[str, Tensor]) -> float:
        """Sum of log pi(y') - log ref(y') over the real rows of a micro-batch."""
        ids_BL, mask_BL, said_BL, ref_B, real_B = (
            tensor.to(self.accelerator.device)
            for tensor in (
                *(batch[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")),
                batch["ref_KL_logps"],
                real_rows(batch),
            )
        )
        labels_BL = ids_BL.masked_fill(said_BL == 0, IGNORED)
        with self.compute_loss_context_manager():
            output = self.model_wrapped(input_ids=ids_BL, attention_mask=mask_BL, labels=labels_BL)
        return float((output.log_probs.double().sum(dim=1) - ref_B)[real_B].sum())

    def _compute_kl_logps(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Read by TRL's loss, which takes the mean of this minus the reference's, here 0."""
        return self.batch_kl.expand(len(batch["label"]))

    @property
    def filler_loss(self) -> float:  # type: ignore[override]
        """Of a good reply whose reward is 0."""
        return self.desirable_weight * float(torch.sigmoid(self.beta * self.batch_kl.clamp(min=0)))

    def compute_loss(self, model: Any, inputs: dict, *rest: Any, **options: Any) -> Tensor:
        inputs["ref_KL_logps"] = torch.zeros_like(inputs["ref_KL_logps"])
        loss: Tensor = super().compute_loss(model, inputs, *rest, **options)
        fillers = int((~real_rows(inputs)).sum())
        if collectives.all_reduce_sum([fillers])[0]:  # they would count as good replies
            self._metrics["train"].clear()
        return loss


def kto(stage: Stage) -> None:
    params = stage.params
    settings: Kto = params.section("kto")
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    splits = ("train", "test", *(("validation",) if has_validation(stage, "ratings") else ()))
    ratings = {split: read_ratings(stage, split) for split in splits}
    good = int(ratings["train"].labels.sum())
    bad = len(ratings["train"].labels) - good
    weight = settings.desirable_weight or (bad / good if good and bad else 1.0)
    logger.info("%d good replies weigh %.3g each, %d bad ones 1", good, weight, bad)
    model = load_from_sft(stage, settings, tokenizer)
    with stage.meter.phase("reference", 0) as work:
        ref = {split: rated_logps(model, ratings[split], stage, work) for split in ratings}
    collator = CountingCollator(DataCollatorForUnpairedPreference(pad_token_id=tokenizer.pad_token_id))

    def losses(model: PreTrainedModel, split: str) -> RowLosses:
        policy = rated_logps(model, ratings[split], stage)
        return row_losses(policy, ref[split], ratings[split].labels, settings.beta, weight)

    validation = (
        Validation(stage, settings.keep, settings.checkpoint_every_steps, losses) if "validation" in splits else None
    )
    filler: dict[str, Any] = {key: [tokenizer.eos_token_id] for key in ("completion_ids", "KL_completion_ids")}
    filler |= {"prompt_ids": [], "label": True, "ref_logps": 0.0, "ref_KL_logps": 0.0}
    options = arguments(stage, settings)
    micro_batch_size = options["per_device_train_batch_size"]
    trainer = BucketedKTOTrainer(
        model=model,
        args=KTOConfig(
            **options | {"per_device_train_batch_size": 2},  # TRL refuses 1, as its KL is of a micro-batch
            beta=settings.beta,
            desirable_weight=weight,
            max_length=None,
            precompute_ref_log_probs=True,
            disable_dropout=False,  # the model has none but its adapter's
        ),
        data_collator=collator,
        train_dataset=Dataset.from_list([filler]),  # TRL wants one; `bucket` gives the rows
        processing_class=tokenizer,
        callbacks=[StageCallback(stage, collator, validation)],
    )
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = micro_batch_size
    logprobs_in_rows(model)
    trainer.loss_is_scaled_for_ga = True
    rows = with_reference(ratings["train"].rows, ref_logps=ref["train"].rated, ref_KL_logps=ref["train"].mismatched)
    trainer.bucket(rows, ratings["train"].lengths, filler, settings)
    train(trainer, stage)
    chosen = validation.finish(trainer.model) if validation is not None else {}
    model, step = trainer.model.eval(), trainer.state.global_step
    with stage.meter.phase("evaluate", step) as work, unsharded(model):
        held_out = rated_logps(model, ratings["test"], stage, work)
    stage.check_params()
    with stage.meter.phase("save", step):
        save_aligned(stage, settings, model, tokenizer)
        if stage.rank != 0:
            return
        write_curves(
            stage, "plots/kto.csv", ("loss", "margin", "good_reward", "bad_reward", "kl", "learning_rate", "grad_norm")
        )
        metrics = {
            **judged(held_out, ref["test"], ratings["test"].labels, settings.beta, weight),
            "good_replies": good, "bad_replies": bad, "desirable_weight": weight,
            "test_ratings": len(ratings["test"].rows), "train_ratings": good + bad,
            "ratings_too_long": ratings["train"].too_long + ratings["test"].too_long,
            "steps": step, "parameters": model.num_parameters(),
            "learning_parameters": model.num_parameters(only_trainable=True),
            **chosen,
        }  # fmt: skip
        write_json(stage.root / "metrics/kto.json", metrics)
    stage.finish("models/kto", "metrics/kto.json", "plots/kto.csv")


def rated_logps(model: PreTrainedModel, ratings: Ratings, stage: Stage, work: Work | None = None) -> Logps:
    """Log-probability of every rated reply, and of the reply beside it, under `model`; `work` counts the tokens."""
    replies, at_once = ("completion_ids", "KL_completion_ids"), 2 * stage.params.section("kto").micro_batch_size
    return Logps(*(part.numpy() for part in reply_logps(model, ratings.rows, replies, stage, at_once, work)))


def rewards(policy: Logps, ref: Logps, beta: float) -> tuple[NDArray[np.float64], float]:
    """The implicit reward of each reply, [B], and z, their reference point."""
    z = beta * max(0.0, float((policy.mismatched - ref.mismatched).mean()))
    return beta * (policy.rated - ref.rated), z


def row_losses(policy: Logps, ref: Logps, good_B: NDArray[np.bool_], beta: float, weight: float) -> RowLosses:
    """The loss of each reply."""
    reward_B, z = rewards(policy, ref, beta)
    losses_B = np.where(good_B, weight * expit(z - reward_B), expit(reward_B - z))
    return RowLosses(losses_B, np.ones(len(losses_B)))


def judged(
    policy: Logps, ref: Logps, good_B: NDArray[np.bool_], beta: float, weight: float
) -> dict[str, float | None]:
    """Metrics on held-out replies. `accuracy`: how often a good reply's reward is above that of a bad one, over all
    such twos (the area under the ROC curve); None where all are of one kind. Rewards are in nats times beta.
    """
    reward_B, z = rewards(policy, ref, beta)
    good, bad = np.sort(reward_B[good_B]), np.sort(reward_B[~good_B])
    has_both = len(good) > 0 and len(bad) > 0
    above = sum(int(np.searchsorted(bad, good, side).sum()) for side in ("left", "right")) / 2
    return {
        "accuracy": above / (len(good) * len(bad)) if has_both else None,
        "margin": float(good.mean() - bad.mean()) if has_both else None,
        "good_reward": float(good.mean()) if len(good) else None,
        "bad_reward": float(bad.mean()) if len(bad) else None,
        "kl": z / beta,
        "eval_loss": row_losses(policy, ref, good_B, beta, weight).mean,
    }


if __name__ == "__main__":
    sys.exit(run_stage("kto", SECTIONS, INPUTS, kto))
