"""Per-token results at the response tokens of sequences, computed without padding.

Shapes: B sequences, L tokens of prompt and response, N response tokens one after another, D model
width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.modeling.batching import token_budget_batches
from training.modeling.logprobs import output_weight, token_logprobs
from training.modeling.packing import pack, packed_hidden


def response_hidden(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> Tensor:
    """Hidden states [N, D] from which each response token is predicted: those of the token before
    it.

    The last token of a sequence predicts nothing that is asked for, so it is left out.
    """
    packed = pack([ids[:-1] for ids in sequences])
    counts = torch.tensor(
        [len(ids) - length for ids, length in zip(sequences, prompt_lengths, strict=True)]
    )
    first_B = packed.start_B + torch.tensor(prompt_lengths) - 1
    place_N = (
        first_B.repeat_interleave(counts)
        + torch.arange(int(counts.sum()))
        - (counts.cumsum(0) - counts).repeat_interleave(counts)
    )
    return packed_hidden(model, packed, place_N)


def response_targets(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Tensor:
    """The response tokens [N] of all rows, one after another."""
    return torch.tensor(
        [token for b, ids in enumerate(sequences) for token in ids[prompt_lengths[b] :]]
    )


def per_response(
    of_rows: Callable[[list[Sequence[int]], list[int]], Tensor],
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    budget_tokens: int,
) -> list[Tensor]:
    """Results [response length] of each sequence, in order; `of_rows` gets rows of like length and
    returns [N].
    """
    results: list[Tensor] = [torch.empty(0)] * len(sequences)
    for batch in token_budget_batches([len(ids) for ids in sequences], budget_tokens):
        rows, lengths = [sequences[i] for i in batch], [prompt_lengths[i] for i in batch]
        parts = (
            of_rows(rows, lengths)
            .cpu()
            .split([len(ids) - length for ids, length in zip(rows, lengths, strict=True)])
        )
        for i, part in zip(batch, parts, strict=True):
            results[i] = part
    return results


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    temperature: float,
    budget_tokens: int,
) -> list[Tensor]:
    """Log-probs of each response's tokens under `model`, in order."""

    def of_rows(rows: list[Sequence[int]], lengths: list[int]) -> Tensor:
        hidden_ND = response_hidden(model, rows, lengths)
        targets_N = response_targets(rows, lengths).to(hidden_ND.device)
        return token_logprobs(hidden_ND, output_weight(model), targets_N, temperature).logprobs

    return per_response(of_rows, sequences, prompt_lengths, budget_tokens)
