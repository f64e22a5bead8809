"""The folded product is PEFT's, values and gradients, and PEFT's own where folding would not be the same."""

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from config.sections.levers import Lora
from tests.training.support.tiny import policy
from training.modeling.adapters import activate, add_adapter, lora_layers
from training.modeling.lora_linear import _buffers, _FoldedLinear, _Folding

LORA = Lora(rank=3, alpha=6.0, modules=["q", "down"], dropout=0.0)


def layer_with(names: list[str], lora: Lora = LORA) -> LoraLayer:
    """A frozen matrix with adapters whose B is not zero."""
    model = policy().requires_grad_(False)
    for seed, name in enumerate(names):
        add_adapter(model, lora, name, seed, "ppo.lora")
    layer = lora_layers(model)[0]
    for name in names:
        torch.nn.init.normal_(layer.lora_B[name].weight, generator=torch.Generator().manual_seed(7))
        layer.lora_A[name].requires_grad_(True)
        layer.lora_B[name].requires_grad_(True)
    return layer


def results(layer: LoraLayer, folded: bool, x: Tensor) -> list[Tensor]:
    """The output and the gradients of x, A and B."""
    layer.zero_grad()
    x = x.clone().requires_grad_(True)
    y = layer(x) if folded else super(_Folding, layer).forward(x)
    torch.tanh(y).sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def is_folded(y: Tensor) -> bool:
    return type(y.grad_fn).__name__.startswith(_FoldedLinear.__name__)


def test_output_and_gradients_are_those_of_peft() -> None:
    layer = layer_with(["sft", "policy"])
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(1))
    ours, theirs = results(layer, True, x), results(layer, False, x)
    assert is_folded(ours[0])
    assert not is_folded(theirs[0])
    assert len(ours) == len(theirs) == 4
    for our, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, other, atol=1e-5, rtol=1e-5)


def test_layers_that_follow_each_other_do_not_get_in_each_others_way() -> None:
    model = policy().requires_grad_(False)
    add_adapter(model, LORA, "policy", 0, "ppo.lora")
    q, down = lora_layers(model)[:2]  # matrices of different sizes
    assert q.in_features != down.in_features

    def gradients(peft: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        inputs = [torch.randn(4, layer.in_features, generator=generator) for layer in (q, down, q)]
        for layer in (q, down):
            torch.nn.init.normal_(layer.lora_B["policy"].weight, generator=generator)
            layer.zero_grad()
        calls = [super(_Folding, layer).forward if peft else layer for layer in (q, down, q)]
        torch.stack([torch.tanh(call(x)).sum() for call, x in zip(calls, inputs, strict=True)]).sum().backward()
        return [
            weight.grad
            for layer in (q, down)
            for weight in (layer.lora_A["policy"].weight, layer.lora_B["policy"].weight)
        ]

    for ours, theirs in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_is_folded_leaves_nothing_behind_but_one_block() -> None:
    """Of the largest matrix, however many there are."""
    first, second = layer_with(["policy"]), layer_with(["policy"])
    x = torch.ones(1, first.in_features)
    first(x)
    [before] = (block.data_ptr() for dtype, block in _buffers.by_dtype.items() if dtype == torch.float32)
    second(x)
    assert [block.data_ptr() for dtype, block in _buffers.by_dtype.items() if dtype == torch.float32] == [before]


def test_an_adapter_that_is_frozen_gets_no_gradient() -> None:
    layer = layer_with(["policy"])
    layer.lora_A["policy"].requires_grad_(False)
    layer.lora_B["policy"].requires_grad_(False)
    assert len(results(layer, True, torch.ones(1, layer.in_features))) == 2


def test_several_adapters_at_once_are_left_to_peft() -> None:
    layer = layer_with(["sft", "policy"])
    layer._active_adapter = ["sft", "policy"]
    assert not is_folded(layer(torch.ones(1, layer.in_features)))


def test_the_base_alone_answers_where_no_adapter_is_on() -> None:
    layer = layer_with(["policy"])
    activate([layer], None)
    x = torch.ones(1, layer.in_features)
    assert torch.equal(layer(x), layer.get_base_layer()(x))


def test_dropout_is_left_to_peft() -> None:
    layer = layer_with(["policy"], Lora(rank=3, alpha=6.0, modules=["q"], dropout=0.5))
    x = torch.ones(1, layer.in_features)
    assert not is_folded(layer.train()(x))
    assert is_folded(layer.eval()(x))


def test_another_compute_type_is_left_to_peft() -> None:
    layer = layer_with(["policy"])
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_folded(layer(torch.ones(1, layer.in_features)))


def test_gpt2_keeps_its_transposed_matrices_to_peft() -> None:
    model = policy(family="gpt2")
    add_adapter(model, Lora(rank=2, alpha=2.0, modules=["q"], dropout=0.0), "policy", 1, "ppo.lora")
    assert not any(isinstance(layer, _Folding) for layer in lora_layers(model))
