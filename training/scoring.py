"""Scores of a reward model: one number per prompt and response, read at the last real token, normalised as its artifact says.

Shapes: B sequences, L tokens, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.batching import pad_right, token_budget_batches


@torch.no_grad()
def score(reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int) -> Tensor:
    """Normalised scores [B] of token sequences (prompt and response together), in their order."""
    return (raw_scores(reward_model, sequences, budget_tokens) - reward_model.config.score_mean) / reward_model.config.score_std


@torch.no_grad()
def raw_scores(reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int) -> Tensor:
    """What the head says, before normalisation, [B] in fp32."""
    scores_B = torch.empty(len(sequences))
    device = reward_model.device
    for batch in token_budget_batches([len(ids) for ids in sequences], budget_tokens):
        ids_BL = pad_right([sequences[i] for i in batch], reward_model.config.pad_token_id).to(device)
        hidden_BLD = reward_model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        last_B = torch.tensor([len(sequences[i]) - 1 for i in batch], device=device)
        hidden_BD = hidden_BLD[torch.arange(len(batch), device=device), last_B]
        scores_B[batch] = reward_model.score(hidden_BD).squeeze(-1).float().cpu()
    return scores_B
