"""The divergence of a student from its teacher, computed without holding the logits of all tokens at once.

Shapes: N tokens, V vocabulary, D width of the student, E width of the teacher.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.modeling.logprobs import add_product_, chunks, product_dtype


def generalised_jsd(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence [N] between the teacher P and the student Q, in nats.

    beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q

    At the ends, where it is 0, the limit of the divergence over beta is used: KL(P || Q) at 0 and KL(Q || P) at 1.
    Both arguments are log-probabilities [N, V]. Source: Agarwal et al. 2024 (arXiv:2306.13649), section 2 and equation
    1.
    """
    if beta == 0:
        return _kl(teacher_NV, student_NV)
    if beta == 1:
        return _kl(student_NV, teacher_NV)
    mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log(1 - beta))
    return beta * _kl(teacher_NV, mixture_NV) + (1 - beta) * _kl(student_NV, mixture_NV)


def _kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """KL(P || Q) of log-probabilities, [N]."""
    return (p_NV.exp() * (p_NV - q_NV)).sum(dim=1)


class Divergence(NamedTuple):
    """Result of `divergence`."""

    total: Tensor
    """Sum over the tokens, in nats; differentiable in the student's hidden states and weight."""
    agreed_N: Tensor
    """Whether teacher and student have the same most likely token; no gradient."""


def divergence(
    student_ND: Tensor, student_VD: Tensor, teacher_NE: Tensor, teacher_VE: Tensor, beta: float, temperature: float
) -> Divergence:
    """`generalised_jsd` of softmax(hidden @ weight.T / temperature), summed over the tokens, in fp32 and chunk by
    chunk.

    If one vocabulary is padded to more rows than the other, both are used up to the shorter one.
    """
    rows = min(len(student_VD), len(teacher_VE))
    return Divergence(
        *_ChunkedDivergence.apply(student_ND, student_VD[:rows], teacher_NE, teacher_VE[:rows], beta, temperature)
    )


class _ChunkedDivergence(torch.autograd.Function):
    """The gradient of the sum is computed in the forward pass, while a chunk's logits exist, and scaled in the
    backward pass: each logit is computed once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_ND: Tensor,
        student_VD: Tensor,
        teacher_NE: Tensor,
        teacher_VE: Tensor,
        beta: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        dtype, teacher_dtype = product_dtype(student_ND), product_dtype(teacher_NE)
        # fp16 underflows for a gradient before the loss scale is applied
        exact = torch.float32 if dtype == torch.float16 else dtype
        grad_ND = torch.empty_like(student_ND, dtype=exact)
        grad_VD = torch.zeros_like(student_VD, dtype=torch.float32)
        total = torch.zeros((), device=student_ND.device)
        agreed_N = torch.empty(len(student_ND), dtype=torch.bool, device=student_ND.device)
        own_VD, weight_VE = student_VD.to(dtype), teacher_VE.to(teacher_dtype)
        exact_VD = student_VD.to(exact)
        with torch.autocast(student_ND.device.type, enabled=False):
            for rows in chunks(student_ND, student_VD):
                taught = teacher_NE[rows].to(teacher_dtype) @ weight_VE.T
                teacher = torch.log_softmax(taught.float() / temperature, dim=1)
                logits = (student_ND[rows].to(dtype) @ own_VD.T).float()
                agreed_N[rows] = logits.argmax(dim=1) == teacher.argmax(dim=1)
                with torch.enable_grad():
                    logits.requires_grad_()
                    student = torch.log_softmax(logits / temperature, dim=1)
                    loss = generalised_jsd(student, teacher, beta).sum()
                    (grad,) = torch.autograd.grad(loss, logits)
                total += loss.detach()
                grad = grad.to(exact)
                grad_ND[rows] = grad @ exact_VD
                add_product_(grad_VD, grad.T, student_ND[rows].to(exact))
        ctx.save_for_backward(grad_ND, grad_VD.to(student_VD.dtype))
        ctx.dtype = student_ND.dtype
        ctx.mark_non_differentiable(agreed_N)
        return total, agreed_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_ND, grad_VD = ctx.saved_tensors
        return (
            (grad_ND * grad).to(ctx.dtype) if ctx.needs_input_grad[0] else None,
            grad_VD * grad if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
            None,
        )
