"""What the methods share that learn from given replies: the model they start from and save, and the log-probabilities
of two replies to each prompt.

Shapes: B rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.sections.offline import Optimisation
from training.distributed.collectives import map_across_ranks
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.modeling.adapter_base import named_base
from training.modeling.adapters import train_only_adapter
from training.modeling.batching import shared_length
from training.modeling.models import autocast, load_policy
from training.modeling.packing import shares_prefix
from training.modeling.sequences import pair_logps
from training.preparation.tokens import Rows
from training.process.stage import Stage
from training.process.usage import Work

Replies = tuple[str, str]
"""The columns of a row with its two replies."""


class Tokenised:
    """TRL trainer mixin for rows that are tokenised and have their reference log-probs."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def with_reference(rows: Sequence[dict[str, Any]], **logps_B: Tensor | NDArray[np.float64]) -> Rows[dict[str, Any]]:
    """Rows in the form of TRL's loss: each with the reference's log-probs by column."""
    columns = {name: values.tolist() for name, values in logps_B.items()}
    return Rows(
        np.arange(len(rows)),
        lambda index: {**rows[index], **{name: values[index] for name, values in columns.items()}},
    )


def load_from_sft(stage: Stage, settings: Optimisation, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The SFT model on the stage's device, all of it to be trained or an adapter of the stage's name."""
    start, shape = stage.root / "models/sft", stage.params.model
    if settings.lora is None:
        model = load_policy(start, shape, tokenizer, trainable=True)
    else:
        model = load_policy(start, shape, tokenizer, adapter=None)
        train_only_adapter(model, settings.lora, stage.name, stage.params.seed, start)
    moved: Any = model.to(stage.torch_device)
    return moved


def save_aligned(
    stage: Stage, settings: Optimisation, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write models/<stage>, with the tokenizer. Collective."""
    path = stage.root / "models" / stage.name
    with replacing_on_rank0(path) as folder:
        if settings.lora is None:
            save_model(folder, model)
        else:
            save_adapter(folder, model, stage.name, *named_base(stage.root / "models/sft", path))
        if stage.rank == 0:
            tokenizer.save_pretrained(folder)


def reply_logps(
    model: PreTrainedModel,
    rows: Sequence[dict[str, Any]],
    replies: Replies,
    stage: Stage,
    sequences_at_once: int,
    work: Work | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of both replies of every row under `model`, summed over their tokens, two of [B]; `work` counts
    what is read: the prompt once, where the model can share it.
    """
    first, second = replies
    pairs = [(row["prompt_ids"] + row[first], row["prompt_ids"] + row[second]) for row in rows]
    sequences = [first_ids + second_ids for first_ids, second_ids in pairs]
    prompt_lengths = [len(row["prompt_ids"]) for row in rows]
    budget_tokens = sequences_at_once * stage.params.section(stage.name).max_length
    with autocast(stage.params.model, model.device):
        logps = map_across_ranks(
            lambda share: share(budget_tokens),
            lambda size, _, pairs, starts: list(pair_logps(model, pairs, starts, size)),
            sequences,
            pairs,
            prompt_lengths,
        )
    if work is not None:
        once = shares_prefix(model)
        shared = sum(shared_length(*pair) for pair in pairs) if once else 0
        work.add(tokens=sum(map(len, sequences)) - shared, sequences=2 * len(rows))
    chosen, rejected = torch.stack(logps).T
    return chosen, rejected
