"""Passes without gradient over the sequences of an update: processes share them, in pieces that fit
in memory, and all have all results.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from config.sections.online import Online
from training.distributed.collectives import Backoff, map_across_ranks
from training.modeling import scoring
from training.rl.learner import Role

Pass = Callable[[Sequence[Sequence[int]], Sequence[int], Online], list[Tensor]]
"""(sequences, prompt lengths, settings) -> a number per response token: a method of Roles."""


def scores(backoff: Backoff, model: Role, sequences: Sequence[list[int]]) -> Tensor:
    """What the reward model says of each sequence, [B]."""
    return torch.tensor(
        map_across_ranks(
            backoff, lambda size, own: scoring.score(model, own, size).tolist(), sequences
        )
    )


def per_token(
    backoff: Backoff,
    of_role: Pass,
    sequences: Sequence[list[int]],
    prompt_lengths: Sequence[int],
    settings: Online,
) -> list[Tensor]:
    """A number per response token of each sequence, in order."""

    def in_pieces(
        micro_batch_tokens: int, own: Sequence[list[int]], starts: Sequence[int]
    ) -> list[Tensor]:
        smaller = settings.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        return of_role(own, starts, smaller)

    return map_across_ranks(backoff, in_pieces, sequences, prompt_lengths)
