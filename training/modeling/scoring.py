"""Scores of a reward model: one number per prompt and response, read at the last real token,
normalised as its artifact says.

Shapes: B sequences, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.modeling.batching import token_budget_batches
from training.modeling.packing import pack, packed_hidden


@torch.no_grad()
def score(
    reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int
) -> Tensor:
    """Normalised scores [B] of token sequences (prompt and response together), in their order."""
    return (
        raw_scores(reward_model, sequences, budget_tokens) - reward_model.config.score_mean
    ) / reward_model.config.score_std


@torch.no_grad()
def raw_scores(
    reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int
) -> Tensor:
    """What the head says, before normalisation, [B] in fp32."""
    scores_B = torch.empty(len(sequences))
    for batch in token_budget_batches([len(ids) for ids in sequences], budget_tokens):
        packed = pack([sequences[i] for i in batch])
        last_B = packed.start_B + torch.tensor([len(sequences[i]) for i in batch]) - 1
        hidden_BD = packed_hidden(reward_model, packed, last_B)
        scores_B[batch] = reward_model.score(hidden_BD).squeeze(-1).cpu()
    return scores_B
