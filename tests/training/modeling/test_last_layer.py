"""Asking for some tokens gives what asking for all gives there, values and gradients, at less work."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from config.sections.levers import Lora
from tests.training.support.tiny import policy, prompts
from training.modeling.adapters import add_adapter
from training.modeling.last_layer import narrows
from training.modeling.packing import pack, packed_hidden

PACKED = pack([ids[:length] for ids, length in zip(prompts(4), [7, 3, 7, 5], strict=True)])
ALL = torch.arange(len(PACKED.ids_N))
SOME = torch.tensor([6, 1, 13, 20])


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        vocab_size=512,
        max_position_embeddings=64,
        head_dim=4,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_some_tokens_are_as_all_would_give_them(family: str) -> None:
    narrow, whole = model_of(family), model_of(family)
    assert narrows(narrow)
    hidden_KD, hidden_ND = packed_hidden(narrow, PACKED, SOME), packed_hidden(whole, PACKED, ALL)
    torch.testing.assert_close(hidden_KD, hidden_ND[SOME], atol=1e-6, rtol=1e-5)
    torch.tanh(hidden_KD).sum().backward()
    torch.tanh(hidden_ND[SOME]).sum().backward()
    compared = 0
    for (name, named_parameter), (_, other) in zip(narrow.named_parameters(), whole.named_parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(named_parameter.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)
            compared += 1
    assert compared > 15


def test_the_last_feed_forward_sees_only_the_tokens_asked_for() -> None:
    model = model_of("llama")
    flops = []
    for keep in (ALL, SOME):
        with FlopCounterMode(display=False) as counter:
            packed_hidden(model, PACKED, keep)
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == (len(ALL) - len(SOME)) * 2 * 3 * 16 * 40


def test_generation_is_not_touched() -> None:
    narrow, whole = model_of("llama"), model_of("llama")
    assert narrows(narrow)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(narrow(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_family_that_is_built_otherwise_is_left_alone() -> None:
    model = policy(family="gpt2")
    assert not narrows(model)
    assert all("forward" not in vars(module) for module in model.modules() if isinstance(module, nn.Module))


def test_a_narrow_model_with_folded_adapters_ends_with_its_last_reference() -> None:
    model = policy()
    add_adapter(model, Lora(rank=2, alpha=2.0, modules=["q"], dropout=0.0), "policy", 1, "ppo.lora")
    assert narrows(model)
    layer = weakref.ref(model.model.layers[-1])
    gc.collect()
    gc.disable()  # it comes when it likes: until then a cycle keeps a whole model
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()
