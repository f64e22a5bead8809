"""Batches: length buckets, token budgets, padding.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler


class LengthBuckets(Sampler[int]):
    """Visits every row once per epoch, rows of similar length together, batches in random order.

    The order is a function of seed and epoch only, so that a resumed run sees the same data.
    """

    def __init__(
        self, lengths: Sequence[int] | NDArray[np.int64], batch_size: int, seed: int, filler: int | None = None
    ) -> None:
        """`filler` is the index of an empty row, used to pad the last batch where all must have the same size."""
        self._lengths = torch.as_tensor(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._filler = [] if filler is None else [filler] * (-len(lengths) % batch_size)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths) + len(self._filler)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self._lengths), generator=generator)
        # Sorting all rows would make every epoch's batches the same: sort within pools of 50 batches.
        pools = [pool[torch.argsort(self._lengths[pool], stable=True)] for pool in order.split(50 * self._batch_size)]
        batches = [batch for pool in pools for batch in pool.split(self._batch_size)]
        # a short batch would shift the ones after it
        last = batches.pop() if len(batches[-1]) < self._batch_size else None
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
        rows = [int(i) for batch in [*mixed, *([last] if last is not None else [])] for i in batch]
        return iter([*rows, *self._filler])


def token_budget_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of similar length within the token budget.

    A row longer than the budget is a batch of its own. Longest first, so that the memory peak comes first.
    """
    batches: list[list[int]] = []
    remaining = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > remaining:
            batches.append([])
            remaining = budget_tokens
        batches[-1].append(index)
        remaining -= lengths[index]
    return batches


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """[B, L] token ids, padded on the right with `pad`, which no real token of a causal model attends to."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    alike = takewhile(lambda tokens: tokens[0] == tokens[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)
