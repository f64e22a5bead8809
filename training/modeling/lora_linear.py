"""LoRA with one matrix product forward, one backward for the input, and thin ones for A and B.

PEFT computes x W + scaling (x A) B: two thin products and three passes over the output more than the base takes, and
as many backward. With small models that costs more than what freezing W saves. W + scaling B A is cheap to make (2 *
rank * weights FLOPs, against 2 * tokens * weights of the product it goes into), so it is made for each call and never
kept.

Shapes: N tokens (leading dimensions are free), I inputs, O outputs, R rank.
"""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def fold(layer: Any) -> None:
    """Make a PEFT layer compute its product folded wherever the result is the same up to rounding; otherwise PEFT
    computes it.
    """
    if type(layer.get_base_layer()) is nn.Linear and not isinstance(layer, _Folding):
        layer.__class__ = _folding(layer.__class__)


class _Folding:
    """Original class of a layer whose class `_folding` made."""


@cache
def _folding(kind: Any) -> Any:
    """A subclass of the layer with the folded product. A class, because a function stored on the layer would keep it
    alive.
    """

    def forward(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return _forward(layer, kind.forward, x, *arguments, **options)

    return type(f"Folding{kind.__name__}", (_Folding, kind), {"forward": forward})


def _forward(layer: Any, peft: Any, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    names = [] if layer.disable_adapters else layer.active_adapters
    name = names[0] if len(names) == 1 and names[0] in layer.lora_A else None
    base = layer.get_base_layer()
    if (
        name is None
        or arguments
        or options
        or layer.merged
        or base.weight.requires_grad
        or torch.is_autocast_enabled(x.device.type)
        or (layer.training and isinstance(layer.lora_dropout[name], nn.Dropout))
        or any(
            weight.dtype != x.dtype for weight in (base.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
        )
    ):
        by_peft: Tensor = peft(layer, x, *arguments, **options)
        return by_peft
    folded: Tensor = _FoldedLinear.apply(
        x, base.weight, base.bias, layer.scaling[name], layer.lora_A[name].weight, layer.lora_B[name].weight
    )
    return folded


class _FoldedLinear(torch.autograd.Function):
    """x (W + scaling B A) + bias, with gradients for x, A [R, I] and B [O, R].

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scaling: float, a_RI: Tensor, b_OR: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scaling = scaling
        return functional.linear(x, _folded(weight_OI, scaling, a_RI, b_OR), bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        needs_x, _, _, _, learns_a, learns_b = ctx.needs_input_grad
        grad_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_a = grad_b = None
        if needs_x:
            grad_x = (grad_NO @ _folded(weight_OI, ctx.scaling, a_RI, b_OR)).view_as(x)
        # the thin side as rows: with it as columns the same products take up to five
        # times as long on a CPU
        if learns_a:
            grad_a = ((b_OR.T.contiguous() @ grad_NO.T) @ x_NI).mul_(ctx.scaling)
        if learns_b:
            grad_b = ((a_RI @ x_NI.T) @ grad_NO).mul_(ctx.scaling).T
        return grad_x, None, None, None, grad_a, grad_b


class _Buffers(threading.local):
    """One reused buffer per dtype on a CPU, as large as the largest folded matrix: allocating each layer's matrix
    between activations fragments the C library's heap (a stage of 161 MiB of tensors and libraries then held 215 to
    232).
    """

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def _buffer(like: Tensor) -> Tensor | None:
    """Buffer for the next folded matrix, which is used at once; None to allocate it, as CUDA streams run
    concurrently.
    """
    if like.device.type != "cpu":
        return None
    block = _buffers.by_dtype.get(like.dtype)
    if block is None or block.numel() < like.numel():
        block = _buffers.by_dtype[like.dtype] = torch.empty(like.numel(), dtype=like.dtype)
    return block[: like.numel()].view(like.shape)


def _folded(weight_OI: Tensor, scaling: float, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    return torch.addmm(weight_OI, b_OR, a_RI, alpha=scaling, out=_buffer(weight_OI))
