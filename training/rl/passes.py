"""Passes without gradient over the sequences of an update. Collective: processes share the sequences, in pieces that
fit in memory, and all get all results.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.distributed.collectives import Backoff, map_across_ranks
from training.modeling import scoring
from training.rl.learner import Role

Pass = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[Tensor]]
"""(sequences, prompt lengths, tokens of a micro-batch) -> a number per response token: a method of Roles."""


def scores(backoff: Backoff, model: Role | None, sequences: Sequence[list[int]]) -> Tensor:
    """The reward model's score of each sequence, [B]."""
    assert model is not None
    return torch.tensor(
        map_across_ranks(backoff, lambda size, share: scoring.score(model, share, size).tolist(), sequences)
    )


def per_token(
    backoff: Backoff, forward: Pass, sequences: Sequence[list[int]], prompt_lengths: Sequence[int]
) -> list[Tensor]:
    """A number per response token of each sequence, in order."""
    return map_across_ranks(
        backoff, lambda size, share, starts: forward(share, starts, size), sequences, prompt_lengths
    )
