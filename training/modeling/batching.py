"""Order and shape of batches: length buckets, token budgets, padding.

Shapes: B sequences, L tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.utils.data import Sampler


class LengthBuckets(Sampler[int]):
    """Visits every row once an epoch, rows of like length side by side, batches in random order.

    The order is a function of seed and epoch alone, so that a resumed run sees the data of the run
    that never stopped.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, filler: int | None = None
    ) -> None:
        """`filler` is the index of a row that stands for none: it fills the last batch up, where
        all must be of one size.
        """
        self._lengths = torch.tensor(lengths)
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
        # Sorting all rows would make every epoch's batches the same: sort within pools of 50
        # batches.
        pools = [
            pool[torch.argsort(self._lengths[pool], stable=True)]
            for pool in order.split(50 * self._batch_size)
        ]
        batches = [batch for pool in pools for batch in pool.split(self._batch_size)]
        # a short batch would shift those after it
        last = batches.pop() if len(batches[-1]) < self._batch_size else None
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
        rows = [int(i) for batch in [*mixed, *([last] if last is not None else [])] for i in batch]
        return iter([*rows, *self._filler])


def token_budget_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of like length whose tokens together stay within the budget.

    A row longer than the budget is a batch of its own. Longest first, so that the peak of memory
    comes at once.
    """
    batches: list[list[int]] = []
    left = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > left:
            batches.append([])
            left = budget_tokens
        batches[-1].append(index)
        left -= lengths[index]
    return batches


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """[B, L] token ids, short rows filled with `pad` on the right: no real token of a causal model
    sees them.
    """
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    alike = takewhile(lambda tokens: tokens[0] == tokens[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)
