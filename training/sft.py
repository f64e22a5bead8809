"""Stage `sft`: supervised fine-tuning on the demonstrations, loss on the completion only.

data/prepared/sft/ -> models/sft, metrics/sft.json, plots/sft.csv
"""

import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from config.errors import DataError
from training.distributed.collectives import map_across_ranks
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.evaluation.overfitting import RowLosses
from training.hf.checkpoints import TrainedCheckpoints
from training.hf.trainer import BucketedData, CountingCollator, StageCallback, arguments, train
from training.hf.validation import Validation, has_validation
from training.modeling.adapter_base import named_base
from training.modeling.adapters import train_only_adapter
from training.modeling.models import base_model
from training.modeling.sequences import IGNORED, sequence_logprobs
from training.modeling.tokenizer import load_tokenizer
from training.preparation.tokens import Rows, TokenTable
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.run import run_stage
from training.process.stage import Stage

logger = logging.getLogger("training.sft")  # as a process this module is called __main__

SECTIONS = ("seed", "model", "sft")
INPUTS = ("data/prepared/sft", "data/tokenizer")
TRL_TILE_COLUMNS = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE


class BucketedSFTTrainer(BucketedData, TrainedCheckpoints, SFTTrainer):
    """TRL's trainer with batches of similar length."""


def sft(stage: Stage) -> None:
    settings = stage.params.sft
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    demonstrations = {split: examples(stage, split) for split in ("train", "test")}
    splits = {split: examples_of_split.rows for split, examples_of_split in demonstrations.items()}
    base_settings, seed = stage.params.model, stage.params.seed
    if settings.lora is None:
        model = base_model(base_settings, tokenizer, seed, trainable=True)
    else:
        model = base_model(base_settings, tokenizer, seed, adapter=None)
        train_only_adapter(model, settings.lora, "sft", seed, str(base_settings.path))
    collator = CountingCollator(DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id))
    narrow_logit_tiles(len(model.get_output_embeddings().weight))
    validation = None
    if has_validation(stage, "sft"):
        checked = {"validation": examples(stage, "validation").rows, "test": splits["test"]}
        validation = Validation(stage, settings.keep, settings.checkpoint_every_steps,
                                partial(row_losses, rows=checked, stage=stage))  # fmt: skip
    filler = {"input_ids": [tokenizer.eos_token_id], "labels": [IGNORED]}
    trainer = BucketedSFTTrainer(
        model=model,
        args=SFTConfig(**arguments(stage, settings), max_length=settings.max_length),
        data_collator=collator,
        train_dataset=Dataset.from_list([filler]),  # TRL wants one; `bucket` gives the rows
        processing_class=tokenizer,
        callbacks=[StageCallback(stage, collator, validation)],
    )
    trainer.bucket(splits["train"], demonstrations["train"].lengths, filler, settings)
    trainer.eval_dataset = splits["test"]
    train(trainer, stage)
    chosen = validation.finish(trainer.model) if validation is not None else {}
    collator.take()
    with stage.meter.phase("evaluate", trainer.state.global_step) as work:
        held_out = trainer.evaluate()
        evaluated = collator.take()
        work.add(evaluated.tokens, evaluated.sequences)
    stage.check_params()
    with stage.meter.phase("save", trainer.state.global_step):
        with replacing_on_rank0(stage.root / "models/sft") as folder:
            if settings.lora is None:
                save_model(folder, trainer.model)
            else:
                base = named_base(str(base_settings.path), stage.root / "models/sft", base_settings.revision)
                save_adapter(folder, trainer.model, "sft", *base)
            if stage.rank != 0:
                return
            tokenizer.save_pretrained(folder)
        curve = write_curves(stage, "plots/sft.csv", ("loss", "learning_rate", "mean_token_accuracy", "grad_norm"))
        # over all attempts: the Trainer's own mean starts again on resume
        losses = [values["loss"] for values in curve]
        metrics = {
            "eval_loss": held_out["eval_loss"],
            "eval_token_accuracy": held_out["eval_mean_token_accuracy"],
            "train_loss": sum(losses) / len(losses) if losses else None,
            "steps": trainer.state.global_step,
            "parameters": trainer.model.num_parameters(),
            "learning_parameters": trainer.model.num_parameters(only_trainable=True),
            "train_rows": len(splits["train"]),
            "demonstrations_cut": sum(split.cut for split in demonstrations.values()),
            "demonstrations_dropped": sum(split.dropped for split in demonstrations.values()),
            **chosen,
        }
        write_json(stage.root / "metrics/sft.json", metrics)
    stage.finish("models/sft", "metrics/sft.json", "plots/sft.csv")


class Demonstrations(NamedTuple):
    """Tokenised demonstrations: prompt and completion as one sequence, prompt tokens masked in the loss."""

    rows: Rows[dict[str, list[int]]]
    lengths: NDArray[np.int64]
    """Tokens of each."""
    cut: int
    """Rows whose completion loses its end at sft.max_length."""
    dropped: int
    """Rows left out because their prompt alone is as long."""


def examples(stage: Stage, split: str) -> Demonstrations:
    """The demonstrations of a split. Raises DataError if there are none."""
    path = stage.root / f"data/prepared/sft/{split}.arrow"
    longest = stage.params.sft.max_length
    table = TokenTable(path)
    prompts = table.lengths("prompt_ids")
    whole = prompts + table.lengths("completion_ids")
    places = np.flatnonzero(prompts < np.minimum(whole, longest))

    def demonstration(place: int) -> dict[str, list[int]]:
        prompt_ids, completion_ids = table.row(place).values()
        ids = (prompt_ids + completion_ids)[:longest]
        return {"input_ids": ids, "labels": [IGNORED] * len(prompt_ids) + ids[len(prompt_ids) :]}

    if not len(places):
        raise DataError(f"{path} has no demonstration that fits in sft.max_length={longest}. Raise it in params.yaml.")
    cut, dropped = int((whole[places] > longest).sum()), len(table) - len(places)
    if cut or dropped:
        logger.warning(
            "%s: %d of %d demonstrations are cut and %d left out at sft.max_length=%d",
            split, cut, len(table), dropped, longest,
        )  # fmt: skip
    lengths = np.minimum(whole[places], longest)
    return Demonstrations(Rows(places, demonstration), lengths, cut, dropped)


def narrow_logit_tiles(vocabulary: int) -> None:
    """Have TRL's loss hold no more columns of logits than there are tokens: its tiles are 32,768 wide however small
    the vocabulary, 157 MB for 1,200 tokens of the demo, which has 1,024.
    """
    trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(TRL_TILE_COLUMNS, vocabulary)


def row_losses(
    model: PreTrainedModel, split: str, rows: Mapping[str, Rows[dict[str, list[int]]]], stage: Stage
) -> RowLosses:
    """Loss of each demonstration of a split. Collective: processes share the rows."""
    sequences = [row["input_ids"] for row in rows[split]]
    starts = [row["labels"].count(IGNORED) for row in rows[split]]
    settings = stage.params.sft
    logprobs = map_across_ranks(
        lambda work: work(settings.micro_batch_size * settings.max_length),
        lambda size, share, lengths: sequence_logprobs(model, share, lengths, 1.0, size),
        sequences,
        starts,
    )
    return RowLosses(
        np.array([-float(tokens.sum()) for tokens in logprobs]),
        np.array([len(tokens) for tokens in logprobs], dtype=float),
    )


if __name__ == "__main__":
    sys.exit(run_stage("sft", SECTIONS, INPUTS, sft))
