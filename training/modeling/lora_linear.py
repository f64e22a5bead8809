"""LoRA's product without LoRA's overhead: one matrix product forward, one backward for the input,
and thin ones for A and B.

PEFT computes x W + scaling (x A) B: two thin products and three passes over the output more than
the base takes, and as many backward. With small models that costs more than what freezing W saves.
W + scaling B A is cheap to make (2 * rank * weights FLOPs, against 2 * tokens * weights of the
product it goes into), so it is made for each call and never kept.

Shapes: N tokens (leading dimensions are free), I inputs, O outputs, R rank.
"""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def fold(layer: Any) -> None:
    """Have `layer`, one of PEFT's, compute its product folded wherever that is the same up to
    rounding; elsewhere PEFT computes it.
    """
    if type(layer.get_base_layer()) is nn.Linear and not isinstance(layer, _Folding):
        layer.__class__ = _folding(layer.__class__)


class _Folding:
    """Of a layer whose class `_folding` made."""


@cache
def _folding(kind: Any) -> Any:
    """The same kind of layer with the folded product; by its class, as a function of its own on the
    layer would keep it alive.
    """

    def forward(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return _forward(layer, kind.forward, x, *arguments, **options)

    return type(f"Folding{kind.__name__}", (_Folding, kind), {"forward": forward})


def _forward(layer: Any, peft: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    names = [] if layer.disable_adapters else layer.active_adapters
    base = layer.get_base_layer()
    pairs = [
        (layer.lora_A[name].weight, layer.lora_B[name].weight)
        for name in names
        if name in layer.lora_A
    ]
    foldable = (
        pairs
        and not arguments
        and not options
        and not layer.merged
        and not base.weight.requires_grad
        and not torch.is_autocast_enabled(x.device.type)
        and all(
            weight.dtype == x.dtype
            for weight in (base.weight, *(half for pair in pairs for half in pair))
        )
        and not (
            layer.training
            and any(isinstance(layer.lora_dropout[name], nn.Dropout) for name in names)
        )
    )
    if not foldable:
        by_peft: Tensor = peft(layer, x, *arguments, **options)
        return by_peft
    scalings = tuple(layer.scaling[name] for name in names if name in layer.lora_A)
    folded: Tensor = _FoldedLinear.apply(
        x, base.weight, base.bias, scalings, *(half for pair in pairs for half in pair)
    )
    return folded


class _FoldedLinear(torch.autograd.Function):
    """x (W + sum of scaling B A) + bias, with gradients for x and for each A [R, I] and B [O, R].

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        scalings: tuple[float, ...],
        *halves: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, *halves)
        ctx.scalings = scalings
        return functional.linear(x, _folded(weight_OI, scalings, halves), bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, *halves = ctx.saved_tensors
        grad_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = (
            (grad_NO @ _folded(weight_OI, ctx.scalings, halves)).view_as(x)
            if ctx.needs_input_grad[0]
            else None
        )
        grads: list[Tensor | None] = []
        for i, scaling in enumerate(ctx.scalings):
            a_RI, b_OR = halves[2 * i : 2 * i + 2]
            learns_a, learns_b = ctx.needs_input_grad[4 + 2 * i : 6 + 2 * i]
            # the thin side as rows throughout: the same products with it as columns take up to five
            # times as long on a CPU
            grads.append(
                ((b_OR.T.contiguous() @ grad_NO.T) @ x_NI).mul_(scaling) if learns_a else None
            )
            grads.append(((a_RI @ x_NI.T) @ grad_NO).mul_(scaling).T if learns_b else None)
        return grad_x, None, None, None, *grads


class _Buffers(threading.local):
    """On a CPU, one block of memory for each dtype, as large as the largest matrix that was folded
    in it: matrices of each layer that come and go between activations tear the C library's heap to
    pieces (a stage of 161 MiB of tensors and libraries then held 215 to 232).
    """

    def __init__(self) -> None:
        self.of_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def _buffer(like: Tensor) -> Tensor | None:
    """Where the next folded matrix goes, which is used at once and then no more; None to allocate
    it, as CUDA's streams run side by side.
    """
    if like.device.type != "cpu":
        return None
    block = _buffers.of_dtype.get(like.dtype)
    if block is None or block.numel() < like.numel():
        block = _buffers.of_dtype[like.dtype] = torch.empty(like.numel(), dtype=like.dtype)
    return block[: like.numel()].view(like.shape)


def _folded(weight_OI: Tensor, scalings: tuple[float, ...], halves: Any) -> Tensor:
    first, *others = (
        (scaling, halves[2 * i], halves[2 * i + 1]) for i, scaling in enumerate(scalings)
    )
    folded_OI = torch.addmm(weight_OI, first[2], first[1], alpha=first[0], out=_buffer(weight_OI))
    for scaling, a_RI, b_OR in others:
        folded_OI.addmm_(b_OR, a_RI, alpha=scaling)
    return folded_OI
