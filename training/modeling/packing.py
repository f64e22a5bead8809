"""Hidden states of many sequences in one forward pass without padding.

The sequences are concatenated in one row, so that matrix products and elementwise operations see real tokens only.
Only attention needs to know the boundaries; it runs on groups of equally long sequences, each a dense batch.

Sequences that begin alike, the two of a preference pair, can share their first tokens: these stand in the row once,
and attention alone sees them in both.

Shapes: B sequences, N tokens of the row, K of them that are asked for, M places of attention, S tokens that two
sequences share, D model width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from config.errors import ModelError
from training.modeling.last_layer import narrows

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Packed(NamedTuple):
    """Sequences in one row, the longest first."""

    ids_N: Tensor
    position_N: Tensor
    """Position of each token in its own sequence."""
    start_B: Tensor
    """Start of each sequence, in the order given to `pack`."""
    groups: tuple[tuple[int, int], ...]
    """(number of sequences, common length) of each group, in row order."""
    shared: "Shared | None" = None


class Shared(NamedTuple):
    """Indices between the row and attention's places, for sequences that share tokens.

    Places are those of all sequences, group by group, each padded to the length of its group.
    """

    token_M: Tensor
    """Row index of each place; padding has any index."""
    place_N: Tensor
    """Place whose output each row token uses: in the first sequence that has the token."""
    again_S: Tensor
    """Places of the first S row tokens in the second sequence that has them."""


def shares_prefix(model: PreTrainedModel) -> bool:
    """Whether this model computes shared tokens once; otherwise each sequence has its own."""
    return model.config._attn_implementation in PACKABLE


NEARLY_AS_LONG = 7 / 8
"""Sequences that are padded to their group's length have at least this share of it. Another group costs the launch of
its attention, another token only attention.
"""


def pack_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Packed, list[list[int]]]:
    """Pack pairs so that the common prefix of a pair is stored once, with the row index of every token of every
    sequence (pair b has sequences 2 b and 2 b + 1).

    Only for causal models: neither the tokens after the prefix nor padding change what comes before.
    """
    rows = [ids for pair in pairs for ids in pair]
    length_B = np.array([len(ids) for ids in rows])
    at_L = np.arange(length_B.max())
    ids_BL = np.zeros((len(rows), len(at_L)), dtype=np.int64)
    for row, ids in zip(ids_BL, rows, strict=True):
        row[: len(ids)] = ids
    real_BL = at_L < length_B[:, None]
    # 1. how many tokens both sequences of a pair begin with, and which are a sequence's own
    same_PL = (ids_BL[0::2] == ids_BL[1::2]) & real_BL[0::2] & real_BL[1::2]
    alike_P = np.logical_and.accumulate(same_PL, axis=1).sum(axis=1)
    shared_PL = at_L < alike_P[:, None]
    own_BL = real_BL & ~shared_PL.repeat(2, axis=0)
    # 2. the row: what pairs share, then what each sequence has alone
    ids_N = np.concatenate([ids_BL[0::2][shared_PL], ids_BL[own_BL]])
    position_N = np.concatenate([np.broadcast_to(at_L, part.shape)[part] for part in (shared_PL, own_BL)])
    shared = int(alike_P.sum())
    place_BL = ((alike_P.cumsum() - alike_P)[:, None] + at_L).repeat(2, axis=0)
    place_BL[own_BL] = np.arange(shared, len(ids_N))
    # 3. attention's groups, the longest sequences first, each filled up to its group's length
    order_B = np.argsort(-length_B, kind="stable")
    groups: list[tuple[int, int]] = []
    for length in length_B[order_B].tolist():
        if not groups or length < NEARLY_AS_LONG * groups[-1][1]:
            groups.append((0, length))
        groups[-1] = (groups[-1][0] + 1, groups[-1][1])
    filled_B = np.repeat([length for _, length in groups], [count for count, _ in groups])
    token_BL = np.where(real_BL, place_BL, place_BL[:, :1])[order_B]
    token_M = token_BL[at_L < filled_B[:, None]]
    # 4. the places of each token: in its pair's first sequence, and again in the second
    at_BL = (filled_B.cumsum() - filled_B)[:, None] + at_L
    again_BL = (order_B % 2 == 1)[:, None] & (token_BL < shared) & real_BL[order_B]
    first_BL = real_BL[order_B] & ~again_BL
    place_N, again_S = np.zeros(len(ids_N), dtype=np.int64), np.zeros(shared, dtype=np.int64)
    place_N[token_BL[first_BL]] = at_BL[first_BL]
    again_S[token_BL[again_BL]] = at_BL[again_BL]
    in_attention = Shared(*map(torch.from_numpy, (token_M, place_N, again_S)))
    places = [row[:n] for row, n in zip(place_BL.tolist(), length_B.tolist(), strict=True)]
    return Packed(
        torch.from_numpy(ids_N),
        torch.from_numpy(position_N),
        torch.from_numpy(place_BL[:, 0].copy()),
        tuple(groups),
        in_attention,
    ), places


class _Spread(torch.autograd.Function):
    """[N, ...] -> [M, ...]: each token at its places in attention.

    Backward adds the gradients of a token's two places in a fixed order, so that it gives the same bits on any device.
    """

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, *shared: Tensor) -> Tensor:
        token_M, *others = shared
        ctx.save_for_backward(*others)
        return _rows(x_N, token_M)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        place_N, again_S = ctx.saved_tensors
        grad_N = _rows(grad_M, place_N)
        grad_N[: len(again_S)] += _rows(grad_M, again_S)
        return grad_N, None, None, None


class _Collect(torch.autograd.Function):
    """[M, ...] -> [N, ...]: the output of each row token, from the place that computed it."""

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.places = len(x_M)
        return _rows(x_M, place_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        (place_N,) = ctx.saved_tensors
        grad_M = grad_N.new_zeros(ctx.places, *grad_N.shape[1:])
        grad_M[place_N] = grad_N
        return grad_M, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; as a matrix it takes a fifth of the time on a CPU."""
    return x.flatten(1).index_select(0, index).unflatten(1, x.shape[1:])


def pack(sequences: Sequence[Sequence[int]]) -> Packed:
    """The row of `sequences`."""
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    lengths = torch.tensor([len(sequences[i]) for i in order])
    ends = lengths.cumsum(0)
    start_B = torch.empty_like(ends)
    start_B[torch.tensor(order)] = ends - lengths
    ids_N = torch.tensor([token for i in order for token in sequences[i]])
    position_N = torch.arange(len(ids_N)) - (ends - lengths).repeat_interleave(lengths)
    groups = tuple((len(list(same)), length) for length, same in groupby(lengths.tolist()))
    return Packed(ids_N, position_N, start_B, groups)


def packed_hidden(model: PreTrainedModel, packed: Packed, keep_K: Tensor) -> Tensor:
    """Last hidden states [K, D] of the trunk at the row indices `keep_K`, as if each sequence were alone."""
    # the host goes on while the device works: nothing here waits for it
    to_device = partial(Tensor.to, device=model.device, non_blocking=True)
    ids_1N, position_1N = (to_device(x[None]) for x in (packed.ids_N, packed.position_N))
    keep_K = to_device(keep_K)
    shared = packed.shared and Shared(*map(to_device, packed.shared))
    if shares_prefix(model):
        narrow = {"keep_K": keep_K} if narrows(model) else {}
        # A four-dimensional mask is used as it is: the model builds none of its own, which would
        # be N x N.
        hidden_ND: Tensor = model.base_model(
            input_ids=ids_1N,
            position_ids=position_1N,
            attention_mask=ids_1N.new_empty(NO_MASK),
            use_cache=False,
            groups=packed.groups,
            shared=shared,
            **narrow,
        ).last_hidden_state.squeeze(0)
        return hidden_ND if narrow else hidden_ND[keep_K]
    ids_M = ids_1N.squeeze(0) if shared is None else ids_1N.squeeze(0)[shared.token_M]
    rows = ids_M.split([count * length for count, length in packed.groups])
    hidden_MD = torch.cat(
        [
            model.base_model(input_ids=ids.view(group), use_cache=False).last_hidden_state.flatten(0, 1)
            for ids, group in zip(rows, packed.groups, strict=True)
        ]
    )
    return hidden_MD[keep_K if shared is None else shared.place_N[keep_K]]


NO_MASK = (1, 1, 0, 0)


def _by_group(dense: Attention) -> Attention:
    """`dense` (an attention function of transformers), applied group by group if `groups` is given for a packed
    row.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        groups: tuple[tuple[int, int], ...] | None = None, keep_K: Tensor | None = None,
        shared: Shared | None = None, position_ids: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        del keep_K  # meant for the last layer, which passes it on
        if groups is None:
            if attention_mask is not None and attention_mask.shape == NO_MASK:
                raise ModelError(
                    f"{type(module).__name__} does not pass on what its attention needs for packed "
                    "rows. Set model.attention=eager in params.yaml."
                )
            return dense(module, query, key, value, attention_mask, position_ids=position_ids, **options)
        window = options.get("sliding_window")
        if window is not None and groups[0][1] > window:
            raise ModelError(
                f"a sequence of {groups[0][1]} tokens is longer than the model's attention window "
                f"of {window}. Lower model.context_length."
            )
        sizes = [count * length for count, length in groups]
        heads = [x[0].transpose(0, 1) for x in (query, key, value)]
        if shared is not None:
            heads = [_Spread.apply(x, *shared) for x in heads]
        outputs = []
        for q, k, v, group in zip(*(x.split(sizes) for x in heads), groups, strict=True):
            # [n, heads, head] -> [count, heads, length, head]
            q, k, v = (x.unflatten(0, group).transpose(1, 2) for x in (q, k, v))
            # Not `position_ids`, which belong to the row: flash attention would infer from them where sequences end.
            output, _ = dense(module, q, k, v, None, **options)
            outputs.append(output.flatten(0, 1))  # [count, length, heads, head] -> [n, heads, head]
        output_N = torch.cat(outputs)
        if shared is not None:
            output_N = _Collect.apply(output_N, shared.place_N)
        return output_N.unsqueeze(0), None

    return attention


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Like transformers' attention, but queries of one new token that share keys and values become rows of one query,
    where transformers would repeat the cache for each of them.
    """
    shared = query.shape[1] // key.shape[1]
    others = options.get("cache"), options.get("position_bias")
    if shared == 1 or query.shape[2] > 1 or any(other is not None for other in others):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    # [B, heads, 1, head] -> [B, heads of keys, shared, head]
    rows = query.squeeze(2).unflatten(1, (-1, shared))
    output = nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
    return output.flatten(1, 2)[:, None], None


PACKABLE = {"sdpa": _sdpa, "flash_attention_2": flash_attention_forward}
"""Attention functions by the name in model.attention. With any other, groups of equal length go through the whole
model one by one.
"""
for _name, _dense in PACKABLE.items():
    AttentionInterface.register(_name, _by_group(_dense))
