"""Packed rows give every sequence what it gets alone, whatever lies beside it, and spend nothing on padding."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, modeling_flash_attention_utils

from config.errors import ModelError
from tests.training.support.tiny import FAMILIES, policy, prompts
from training.modeling.packing import NO_MASK, PACKABLE, pack, pack_pairs, packed_hidden

SEQUENCES = [ids[:length] for ids, length in zip(prompts(6), [7, 3, 7, 1, 5, 3], strict=True)]


def test_the_longest_come_first_and_equal_lengths_are_one_group() -> None:
    packed = pack([[5, 6], [7, 8, 9], [1, 2]])
    assert packed.ids_N.tolist() == [7, 8, 9, 5, 6, 1, 2]
    assert packed.position_N.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert packed.start_B.tolist() == [3, 0, 5]
    assert packed.groups == ((1, 3), (2, 2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_are_those_of_each_sequence_alone(family: str, attention: str) -> None:
    model = policy(family=family)
    model.set_attn_implementation(attention)
    packed = pack(SEQUENCES)
    hidden_ND = packed_hidden(model, packed, torch.arange(len(packed.ids_N)))
    assert len(hidden_ND) == sum(map(len, SEQUENCES))
    for ids, start in zip(SEQUENCES, packed.start_B.tolist(), strict=True):
        alone = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(hidden_ND[start : start + len(ids)], alone, atol=1e-5, rtol=0)


PAIRS = [
    ([*ids, 5, 6, 7, 2], [*ids, *other, 2])
    for ids, other in zip(prompts(5), [[6], [5, 6, 8], [], [9] * 20, [5, 6, 7]], strict=True)
] + [([7, 2], [8, 9, 2]), ([2], [2]), ([4, 5], [4, 5, 6])]
"""Of each case: replies that differ at once, late, in length alone; that are one; no prompt; the first sequence begins
the second.
"""


def test_what_both_sequences_begin_with_stands_in_the_row_once() -> None:
    packed, places = pack_pairs([([1, 2, 3, 4], [1, 2, 5]), ([6, 7], [6, 7, 8])])
    assert packed.ids_N.tolist() == [1, 2, 6, 7, 3, 4, 5, 8]
    assert packed.position_N.tolist() == [0, 1, 0, 1, 2, 3, 2, 2]
    assert places == [[0, 1, 4, 5], [0, 1, 6], [2, 3], [2, 3, 7]]
    assert packed.groups == ((1, 4), (2, 3), (1, 2))  # attention sees what is shared in both


def test_sequences_nearly_as_long_are_filled_up_to_one_length() -> None:
    lengths = [16, 16, 15, 14, 13, 2]
    packed, _ = pack_pairs([([1] * a, [2] * b) for a, b in zip(lengths[::2], lengths[1::2], strict=True)])
    assert packed.groups == ((4, 16), (1, 13), (1, 2))
    assert len(packed.ids_N) == sum(lengths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pairs", [PAIRS, [PAIRS[0]] * 3, PAIRS[6:7]])
def test_hidden_states_and_gradients_of_pairs_are_those_of_each_sequence_alone(
    family: str, attention: str, pairs: list[tuple[list[int], list[int]]]
) -> None:
    model = policy(family=family).double()
    model.set_attn_implementation(attention)

    def learned(hidden_ND: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        (torch.tanh(hidden_ND) * torch.linspace(-1, 1, len(hidden_ND))[:, None]).sum().backward()
        gradients = [p.grad for p in model.base_model.parameters() if p.grad is not None]
        return hidden_ND.detach(), gradients

    packed, places = pack_pairs(pairs)
    hidden, gradients = learned(packed_hidden(model, packed, torch.tensor([at for place in places for at in place])))
    alone, expected = learned(
        torch.cat(
            [model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0] for pair in pairs for ids in pair]
        )
    )
    torch.testing.assert_close(hidden, alone, atol=1e-6, rtol=0)
    for ours, theirs in zip(gradients, expected, strict=True):
        # their norms compute in fp32 whatever the weights are
        torch.testing.assert_close(ours, theirs, atol=1e-6 + 1e-4 * float(theirs.abs().max()), rtol=0)


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """What the package's flash_attn_func gives, [B, L, H, D]."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """flash_attn_varlen_func, [N, H, D]; it refuses what the kernel would read beyond its memory for."""
    for ends, longest, tokens in ((cu_seqlens_q, max_seqlen_q, len(q)), (cu_seqlens_k, max_seqlen_k, len(k))):
        assert int(ends[-1]) == tokens, "an illegal access"
        assert longest == int(ends.diff().max())
    ends = cu_seqlens_q.tolist()
    pieces = [slice(start, end) for start, end in pairwise(ends)]
    return torch.cat([flash(q[None, p], k[None, p], v[None, p], causal, softmax_scale)[0] for p in pieces])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_flash_attention_is_asked_for_each_sequence_of_a_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Transformers' own preparation, with kernels that check what they are handed; groups of one sequence and
    of several.
    """
    functions = (flash, flash_varlen, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    model = policy(family=family)
    expected = [model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in SEQUENCES]
    model.config._attn_implementation = "flash_attention_2"
    packed = pack(SEQUENCES)
    assert {count for count, length in packed.groups if length > 1} == {1, 2}
    hidden_ND = packed_hidden(model, packed, torch.arange(len(packed.ids_N)))
    for alone, start in zip(expected, packed.start_B.tolist(), strict=True):
        torch.testing.assert_close(hidden_ND[start : start + len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_of_pairs_give_the_same_gradients(family: str) -> None:
    gradients = []
    for recomputed in (False, True):
        model = policy(family=family)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        packed, places = pack_pairs(PAIRS)
        last = torch.tensor([place[-1] for place in places])
        torch.tanh(packed_hidden(model, packed, last)).sum().backward()
        gradients.append([p.grad for p in model.base_model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    plain, recomputed = policy(family=family), policy(family=family)
    recomputed.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed.train()
    for model in (plain, recomputed):
        packed = pack(SEQUENCES)
        torch.tanh(packed_hidden(model, packed, torch.arange(1, len(packed.ids_N), 2))).sum().backward()
    grads = [
        (a.grad, b.grad)
        for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True)
        if a.grad is not None
    ]
    assert len(grads) > 10
    for ours, theirs in grads:
        torch.testing.assert_close(theirs, ours)


def test_attention_of_a_packed_row_without_its_groups_is_refused() -> None:
    attention = torch.nn.Module()
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="eager"):
        AttentionInterface()["sdpa"](attention, states, states, states, torch.empty(NO_MASK))


def test_a_sequence_longer_than_the_attention_window_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="window of 2"):
        AttentionInterface()["sdpa"](
            torch.nn.Module(), states, states, states, torch.empty(NO_MASK), groups=((1, 3),), sliding_window=2
        )


def test_the_attentions_that_can_be_packed_are_those_params_offer() -> None:
    assert set(PACKABLE) == {"sdpa", "flash_attention_2"}
