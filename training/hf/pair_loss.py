"""Pairs and rated replies in a Trainer: the loss is a mean over those of a batch, however it is split into
micro-batches and processes, and tokens of a pair's common prefix count once.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from training.distributed import collectives
from training.hf.trainer import CountingCollator, real_rows


class PairLoss:
    """TRL trainer mixin whose loss is a mean over the pairs of a micro-batch, or over other items.

    A filler's two replies are one: its loss is a constant without gradient, and its metrics are 0.
    """

    item_sequences: ClassVar[int] = 2
    """Sequences of an item: two of a pair."""

    filler_loss: float = math.log(2)
    pair_means: ClassVar[tuple[str, ...]]
    """TRL's metrics that are means over pairs."""
    _metrics: dict[str, dict[str, list[float]]]

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int:
        """Pairs of the batch over micro-batches and processes."""
        pairs = sum(int(real_rows(batch).sum()) // self.item_sequences for batch in batch_samples)
        return int(collectives.all_reduce_sum([pairs])[0])

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Tensor:
        counts = len(inputs["attention_mask"]), real_rows(inputs).sum()
        rows, pairs = (int(count) // self.item_sequences for count in counts)
        loss: Tensor = super().compute_loss(model, inputs)  # type: ignore[misc]
        totals = collectives.all_reduce_sum([rows, pairs])
        for name in self.pair_means:
            metric = self._metrics["train"][name]
            metric[-1:] = [metric[-1] * totals[0] / totals[1]] if totals[1] else []
        # gradients are averaged over processes
        share = rows / (num_items_in_batch or rows) * collectives.world_size()
        return loss * share - (rows - pairs) / rows * self.filler_loss * share


class PairCountingCollator(CountingCollator):
    """Counts the common prefix of a pair once."""

    def __call__(self, examples: list[dict]) -> Mapping[str, Any]:
        batch = super().__call__(examples)
        ids, mask, real = (
            x.view(2, -1, *x.shape[1:]) for x in (batch["input_ids"], batch["attention_mask"], real_rows(batch))
        )
        same_BL = (ids[0] == ids[1]) & mask[0].bool() & mask[1].bool() & real[0][:, None]
        self.work.tokens -= int(same_BL.long().cumprod(dim=1).sum())
        return batch


class PairCollator:
    """TRL's batch of pairs: {input_ids, attention_mask} [2B, L] of the chosen sequences and then the rejected ones,
    padded on the right. It makes two tensors, where TRL's makes one a row.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        rows = [row[side] for side in ("chosen_ids", "rejected_ids") for row in examples]
        lengths = np.array([len(ids) for ids in rows])
        input_ids = np.full((len(rows), lengths.max()), self._pad)
        for padded, ids in zip(input_ids, rows, strict=True):
            padded[: len(ids)] = ids
        mask = np.arange(input_ids.shape[1]) < lengths[:, None]
        return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
