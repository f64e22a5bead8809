"""Hidden states of many sequences in one forward without a single padding token.

The sequences lie one after another in one row, so that every matrix product and every elementwise
operation sees real tokens only; attention alone has to know where one ends and the next begins. It
runs on groups of equally long sequences, each a dense batch.

Shapes: B sequences, N tokens of all sequences one after another, K of them that are asked for, D
model width.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

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
    """Place of each token in its own sequence."""
    start_B: Tensor
    """Where each sequence begins, in the order given to `pack`."""
    groups: tuple[tuple[int, int], ...]
    """(number of sequences, their common length), in the order of the row."""


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
    """Last hidden states [K, D] of the trunk at `keep_K`, places in the row; each sequence as if it
    were alone.
    """
    ids_1N, position_1N = (
        x.unsqueeze(0).to(model.device) for x in (packed.ids_N, packed.position_N)
    )
    keep_K = keep_K.to(model.device)
    if model.config._attn_implementation in PACKABLE:
        narrow = {"keep_K": keep_K} if narrows(model) else {}
        # A mask of four dimensions is taken as it is: the model builds none of its own, which would
        # be N x N.
        hidden_ND: Tensor = model.base_model(
            input_ids=ids_1N,
            position_ids=position_1N,
            attention_mask=ids_1N.new_empty(NO_MASK),
            use_cache=False,
            groups=packed.groups,
            **narrow,
        ).last_hidden_state.squeeze(0)
        return hidden_ND if narrow else hidden_ND[keep_K]
    rows = ids_1N.squeeze(0).split([count * length for count, length in packed.groups])
    return torch.cat(
        [
            model.base_model(
                input_ids=ids_N.view(group), use_cache=False
            ).last_hidden_state.flatten(0, 1)
            for ids_N, group in zip(rows, packed.groups, strict=True)
        ]
    )[keep_K]


NO_MASK = (1, 1, 0, 0)


def _by_group(dense: Attention) -> Attention:
    """`dense`, an attention of transformers, or what it gives group by group where `groups` says
    that the row is packed.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        groups: tuple[tuple[int, int], ...] | None = None, keep_K: Tensor | None = None,
        position_ids: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        del keep_K  # meant for the last layer, which passes it on
        if groups is None:
            if attention_mask is not None and attention_mask.shape == NO_MASK:
                raise ModelError(
                    f"{type(module).__name__} does not pass on what its attention needs for packed "
                    "rows. Set model.attention=eager in params.yaml."
                )
            return dense(
                module, query, key, value, attention_mask, position_ids=position_ids, **options
            )
        window = options.get("sliding_window")
        if window is not None and groups[0][1] > window:
            raise ModelError(
                f"a sequence of {groups[0][1]} tokens is longer than the model's attention window "
                f"of {window}. Lower model.context_length."
            )
        sizes = [count * length for count, length in groups]
        outputs = []
        for q, k, v, group in zip(
            *(x[0].split(sizes, dim=1) for x in (query, key, value)), groups, strict=True
        ):
            # [heads, n, head] -> [count, heads, length, head]
            q, k, v = (x.unflatten(1, group).transpose(0, 1) for x in (q, k, v))
            # Not `position_ids`, which are those of the whole row: flash attention reads from them
            # where sequences end.
            output, _ = dense(module, q, k, v, None, **options)
            outputs.append(output.flatten(0, 1))  # [count, length, heads, head] -> [n, heads, head]
        return torch.cat(outputs).unsqueeze(0), None

    return attention


PACKABLE = {"sdpa": sdpa_attention_forward, "flash_attention_2": flash_attention_forward}
"""By the name in model.attention. With any other, groups of equal length go through the whole model
one by one.
"""
for _name, _dense in PACKABLE.items():
    AttentionInterface.register(_name, _by_group(_dense))
