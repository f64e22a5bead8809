"""Per-token results at the response tokens of sequences, computed without padding where it can be helped.

Shapes: B sequences, L tokens of prompt and response, N response tokens one after another, D model width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.batching import pad_right, token_budget_batches
from training.logprobs import output_weight, token_logprobs


def response_hidden(model: PreTrainedModel, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], pad: int) -> Tensor:
    """Hidden states [N, D] from which each response token is predicted: those of the token before it.

    Padding is on the right, where no real token of a causal model can see it, so no attention mask is needed.
    """
    ids_BL = pad_right(sequences, pad).to(model.device)
    hidden_BLD = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    rows_N = torch.tensor([b for b, ids in enumerate(sequences) for _ in range(len(ids) - prompt_lengths[b])])
    places_N = torch.tensor([t - 1 for b, ids in enumerate(sequences) for t in range(prompt_lengths[b], len(ids))])
    return hidden_BLD[rows_N.to(hidden_BLD.device), places_N.to(hidden_BLD.device)]


def response_targets(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Tensor:
    """The response tokens [N] of all rows, one after another."""
    return torch.tensor([token for b, ids in enumerate(sequences) for token in ids[prompt_lengths[b] :]])


def per_response(
    of_rows: Callable[[list[Sequence[int]], list[int]], Tensor],
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    budget_tokens: int,
) -> list[Tensor]:
    """Results [response length] of each sequence, in order; `of_rows` gets rows of like length and returns [N]."""
    results: list[Tensor] = [torch.empty(0)] * len(sequences)
    for batch in token_budget_batches([len(ids) for ids in sequences], budget_tokens):
        rows, lengths = [sequences[i] for i in batch], [prompt_lengths[i] for i in batch]
        parts = of_rows(rows, lengths).cpu().split([len(ids) - length for ids, length in zip(rows, lengths, strict=True)])
        for i, part in zip(batch, parts, strict=True):
            results[i] = part
    return results


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], temperature: float, budget_tokens: int, pad: int
) -> list[Tensor]:  # fmt: skip
    """Log-probs of each response's tokens under `model`, in order."""

    def of_rows(rows: list[Sequence[int]], lengths: list[int]) -> Tensor:
        hidden_ND = response_hidden(model, rows, lengths, pad)
        targets_N = response_targets(rows, lengths).to(hidden_ND.device)
        return token_logprobs(hidden_ND, output_weight(model), targets_N, temperature).logprobs

    return per_response(of_rows, sequences, prompt_lengths, budget_tokens)
