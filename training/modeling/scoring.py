"""Scores of a reward model: one number per prompt and response, read at the last real token, normalised as stored with
the model.

Shapes: B sequences or pairs, L tokens of the longest, D model width.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from training.modeling.batching import token_budget_batches
from training.modeling.packing import pack, pack_pairs, packed_hidden

Ids = Sequence[int]


@torch.no_grad()
def score(reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int) -> Tensor:
    """Normalised scores [B] of token sequences (prompt and response together), in their order."""
    return (
        raw_scores(reward_model, sequences, budget_tokens) - reward_model.config.score_mean
    ) / reward_model.config.score_std


@torch.no_grad()
def raw_scores(reward_model: PreTrainedModel, sequences: Sequence[Sequence[int]], budget_tokens: int) -> Tensor:
    """Head outputs before normalisation, [B] in fp32."""
    batches = token_budget_batches([len(ids) for ids in sequences], budget_tokens)
    scores = []
    for batch in batches:
        packed = pack([sequences[i] for i in batch])
        last_B = packed.start_B + torch.tensor([len(sequences[i]) for i in batch]) - 1
        scores.append(reward_model.score(packed_hidden(reward_model, packed, last_B)).squeeze(-1))
    return _in_order(batches, scores, torch.empty(len(sequences)))


@torch.no_grad()
def raw_pair_scores(reward_model: PreTrainedModel, pairs: Sequence[tuple[Ids, Ids]], budget_tokens: int) -> Tensor:
    """Head outputs for both sequences of each pair, before normalisation, [B, 2] in fp32."""
    batches = token_budget_batches([len(a) + len(b) for a, b in pairs], budget_tokens)
    scores = [pair_scores(reward_model, [pairs[i] for i in batch]) for batch in batches]
    return _in_order(batches, scores, torch.empty(len(pairs), 2))


def _in_order(batches: Sequence[list[int]], scores: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Scores of batches in the order of their rows, put into `empty`; only now is an accelerator waited for."""
    if scores:
        empty[[i for batch in batches for i in batch]] = torch.cat(list(scores)).cpu()
    return empty


def pair_scores(reward_model: PreTrainedModel, pairs: Sequence[tuple[Ids, Ids]]) -> Tensor:
    """The same for one batch, differentiable; the common prefix of a pair is computed once."""
    packed, places = pack_pairs(pairs)
    last_2B = torch.tensor([place[-1] for place in places])
    hidden_2BD = packed_hidden(reward_model, packed, last_2B)
    scores_2B: Tensor = reward_model.score(hidden_2BD).squeeze(-1)
    return scores_2B.view(-1, 2)


def score_in_pairs(reward_model: PreTrainedModel) -> None:
    """Replace the model's forward by one that takes TRL's RewardTrainer batch (chosen sequences, then the rejected
    ones of the same pairs, padded) and scores it with `pair_scores`.
    """
    reward_model.forward = MethodType(_forward, reward_model)


def _forward(
    reward_model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, **_: Any
) -> SequenceClassifierOutput:
    """Scores [2B, 1] of sequences [2B, L] that are padded on the right."""
    lengths = attention_mask.sum(dim=1).tolist()
    sequences = [ids[:n] for ids, n in zip(input_ids.tolist(), lengths, strict=True)]
    half = len(sequences) // 2
    scores_B2 = pair_scores(reward_model, list(zip(sequences[:half], sequences[half:], strict=True)))
    return SequenceClassifierOutput(logits=torch.cat([scores_B2[:, :1], scores_B2[:, 1:]]))
