"""Per-token results at the response tokens of sequences, computed without padding.

Shapes: B sequences or pairs, L tokens of prompt and response, N response tokens one after another, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from training.modeling.batching import pad_right, token_budget_batches
from training.modeling.logprobs import TokenLogprobs, output_weight, token_logprobs
from training.modeling.packing import Packed, pack, pack_pairs, packed_hidden

IGNORED = -100
"""Label of a token that does not count in the loss."""


def response_hidden(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> Tensor:
    """Hidden states [N, D] from which each response token is predicted: those of the token before it.

    The last token of a sequence predicts nothing needed, so it is left out.
    """
    packed = pack([ids[:-1] for ids in sequences])
    counts = torch.tensor([len(ids) - length for ids, length in zip(sequences, prompt_lengths, strict=True)])
    first_B = packed.start_B + torch.tensor(prompt_lengths) - 1
    place_N = (
        first_B.repeat_interleave(counts)
        + torch.arange(int(counts.sum()))
        - (counts.cumsum(0) - counts).repeat_interleave(counts)
    )
    return packed_hidden(model, packed, place_N)


def response_targets(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Tensor:
    """The response tokens [N] of all rows, one after another."""
    return torch.tensor([token for b, ids in enumerate(sequences) for token in ids[prompt_lengths[b] :]])


def per_response(
    run: Callable[[list[Sequence[int]], list[int]], Tensor],
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    budget_tokens: int,
) -> list[Tensor]:
    """Results [response length] of each sequence, in order; `run` gets rows of similar length and returns [N]."""
    batches = token_budget_batches([len(ids) for ids in sequences], budget_tokens)
    results = [run([sequences[i] for i in batch], [prompt_lengths[i] for i in batch]) for batch in batches]
    order = [i for batch in batches for i in batch]
    lengths = [len(sequences[i]) - prompt_lengths[i] for i in order]
    parts = torch.cat(results).cpu().split(lengths) if results else ()
    by_row = dict(zip(order, parts, strict=True))
    return [by_row[i] for i in range(len(sequences))]


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    temperature: float,
    budget_tokens: int,
) -> list[Tensor]:
    """Log-probs of each response's tokens under `model`, in order."""

    def run_batch(rows: list[Sequence[int]], lengths: list[int]) -> Tensor:
        hidden_ND = response_hidden(model, rows, lengths)
        targets_N = response_targets(rows, lengths).to(hidden_ND.device, non_blocking=True)
        return token_logprobs(hidden_ND, output_weight(model), targets_N, temperature).logprobs

    return per_response(run_batch, sequences, prompt_lengths, budget_tokens)


@torch.no_grad()
def pair_logps(
    model: PreTrainedModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    prompt_lengths: Sequence[int],
    budget_tokens: int,
) -> Tensor:
    """Log-probs of both responses of each pair, summed over their tokens, [B, 2] in fp64."""
    sums_B2 = torch.empty(len(pairs), 2, dtype=torch.float64)
    for batch in token_budget_batches([len(a) + len(b) for a, b in pairs], budget_tokens):
        rows = [ids for i in batch for ids in pairs[i]]
        ids_BL = pad_right(rows, 0)
        place_L = torch.arange(ids_BL.shape[1])
        starts, ends = (
            torch.tensor(lengths)
            for lengths in ([prompt_lengths[i] for i in batch for _ in range(2)], list(map(len, rows)))
        )
        said_BL = (place_L >= starts[:, None]) & (place_L < ends[:, None])
        logprobs = _said_logprobs(model, *pack_pairs([pairs[i] for i in batch]), ids_BL, said_BL)
        logprobs_BT = torch.zeros(ids_BL[:, 1:].shape, dtype=torch.float64)
        logprobs_BT[said_BL[:, 1:]] = logprobs.logprobs.cpu().double()
        sums_B2[batch] = logprobs_BT.sum(dim=1).view(-1, 2)
    return sums_B2


def _said_logprobs(
    model: PreTrainedModel, packed: Packed, places: Sequence[Sequence[int]], ids_BL: Tensor, said_BL: Tensor
) -> TokenLogprobs:
    """Log-probs [N] of the tokens where `said_BL`, in the order of its rows, which are those of `ids_BL` and of
    `places`: the packed row's index of each token. A first token has none.
    """
    said_BT = said_BL[:, 1:]
    before_BT = pad_right(places, 0)[:, :-1]
    hidden_ND = packed_hidden(model, packed, before_BT[said_BT.cpu()])
    targets_N = ids_BL[:, 1:][said_BT].to(hidden_ND.device, non_blocking=True)
    return token_logprobs(hidden_ND, output_weight(model), targets_N, 1.0)


@dataclass
class LabelLogprobs(ModelOutput):
    """The output that TRL's trainers read from a forward pass, [B, L - 1] each (of pairs 2B), 0 where there is no
    label.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    """Metrics that our stages leave out, as they do `is_top1`: not computed, 0."""
    is_top1: Tensor | None = None


def logprobs_in_pairs(model: PreTrainedModel) -> None:
    """Replace the model's forward by one that takes TRL's DPOTrainer batch (chosen sequences, then the rejected ones
    of the same pairs, padded) and returns the log-probs of the labels; the common prefix of a pair is computed once.
    """
    model.forward = MethodType(_forward_pairs, model)


def logprobs_in_rows(model: PreTrainedModel) -> None:
    """Replace the model's forward by one that takes TRL's KTOTrainer batch, padded, and returns the log-probs of the
    labels.
    """
    model.forward = MethodType(_forward_rows, model)


def _forward_pairs(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any
) -> LabelLogprobs:
    """Log-probs of `labels` [2B, L], whose sequences are padded on the right."""
    in_pairs_B = torch.arange(len(input_ids)).view(2, -1).T.flatten()
    order, back = (order.to(input_ids.device, non_blocking=True) for order in (in_pairs_B, in_pairs_B.argsort()))
    rows = _unpadded(input_ids[order], attention_mask[order])
    packed, places = pack_pairs(list(zip(rows[0::2], rows[1::2], strict=True)))
    result = _label_logprobs(model, packed, places, input_ids[order], labels[order])
    return LabelLogprobs(*(part[back] for part in result.to_tuple()))


def _forward_rows(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any
) -> LabelLogprobs:
    """Log-probs of `labels` [B, L], whose sequences are padded on the right."""
    rows = _unpadded(input_ids, attention_mask)
    packed = pack(rows)
    places = [range(start, start + len(ids)) for start, ids in zip(packed.start_B.tolist(), rows, strict=True)]
    return _label_logprobs(model, packed, places, input_ids, labels)


def _unpadded(ids_BL: Tensor, mask_BL: Tensor) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(ids_BL.tolist(), mask_BL.sum(dim=1).tolist(), strict=True)]


def _label_logprobs(
    model: PreTrainedModel, packed: Packed, places: Sequence[Sequence[int]], ids_BL: Tensor, labels_BL: Tensor
) -> LabelLogprobs:
    said_BL = labels_BL != IGNORED
    logprobs = _said_logprobs(model, packed, places, ids_BL, said_BL)
    said_BT = said_BL[:, 1:]
    log_probs, entropy = (part.new_zeros(said_BT.shape).masked_scatter(said_BT, part) for part in logprobs)
    unread = torch.zeros_like(entropy)
    return LabelLogprobs(log_probs, entropy, unread, unread.bool())
