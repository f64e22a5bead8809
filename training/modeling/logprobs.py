"""Log-probs of given tokens, without holding all logits at once.

Shapes: N tokens, D model width, V vocabulary.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from config.errors import ModelError
from config.work import BYTES_PER_CHUNK_LOGIT, CHUNK_LOGITS


class TokenLogprobs(NamedTuple):
    """[N] each."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution at that token, in nats; no gradient."""


def output_weight(model: PreTrainedModel) -> Tensor:
    """The [V, D] matrix that maps hidden states to logits.

    Raises ModelError for a model whose logits are not just that product.
    """
    head = model.get_output_embeddings()
    if getattr(model.config, "final_logit_softcapping", None) or getattr(head, "bias", None) is not None:
        raise ModelError(
            f"{model.config.model_type}: its logits are capped or biased, which the chunked "
            "log-probabilities do not compute."
        )
    weight: Tensor = head.weight
    return weight


def token_logprobs(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float) -> TokenLogprobs:
    """log softmax(hidden @ weight.T / temperature) at the targets, in fp32, chunk by chunk; differentiable in hidden
    and weight.
    """
    return TokenLogprobs(*_ChunkedLogprobs.apply(hidden_ND, weight_VD, targets_N, temperature))


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps no logits; backward recomputes each chunk's. d logprob / d logits = onehot(target) - softmax."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.temperature, ctx.dtype = temperature, product_dtype(hidden_ND)
        product_VD = weight_VD.to(ctx.dtype)
        logprobs_N = torch.empty(len(targets_N), device=hidden_ND.device)
        entropy_N = torch.empty_like(logprobs_N)
        for rows in chunks(hidden_ND, weight_VD):
            log_softmax = _log_softmax(hidden_ND[rows].to(ctx.dtype), product_VD, temperature)
            logprobs_N[rows] = log_softmax.gather(1, targets_N[rows, None]).squeeze(1)
            entropy_N[rows] = -(log_softmax.exp() * log_softmax).sum(dim=1)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        product_VD = weight_VD.to(ctx.dtype)
        for rows in chunks(hidden_ND, weight_VD):
            hidden = hidden_ND[rows].to(ctx.dtype)
            grad_logits = _log_softmax(hidden, product_VD, ctx.temperature).exp_().neg_()
            grad_logits.scatter_add_(
                1, targets_N[rows, None], torch.ones_like(targets_N[rows, None], dtype=grad_logits.dtype)
            )
            grad_logits = grad_logits.mul_(grad_N[rows, None] / ctx.temperature).to(ctx.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = (grad_logits @ product_VD).to(hidden_ND.dtype)
            if grad_weight_VD is not None:
                add_product_(grad_weight_VD, grad_logits.T, hidden)
        return grad_hidden_ND, grad_weight_VD, None, None


def _log_softmax(hidden: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight_VD.T
    return torch.log_softmax(logits.float().div_(temperature), dim=-1)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product with `x` is computed here: under autocast its type, else that of `x`. Hidden
    states are fp32 under autocast, as the residual stream is.
    """
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def add_product_(total: Tensor, matrix: Tensor, right: Tensor) -> None:
    """total += left @ right, where the product may have a lower precision."""
    if matrix.dtype == total.dtype:
        total.addmm_(matrix, right)
    else:
        total.add_(matrix @ right)


def chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    """Rows of `hidden_ND` per chunk of logits, so that the peak does not grow with tokens x vocabulary."""
    rows = max(1, logits_at_once(hidden_ND.device) // len(weight_VD))
    return [slice(start, start + rows) for start in range(0, len(hidden_ND), rows)]


def logits_at_once(device: torch.device) -> int:
    """Logits of a chunk on this device."""
    if device.type == "cpu":
        return CHUNK_LOGITS
    return max(CHUNK_LOGITS, _accelerator_bytes() // BYTES_PER_CHUNK_LOGIT)


@cache
def _accelerator_bytes() -> int:
    """Memory of this process's accelerator: asked once, as every micro-batch needs it."""
    return torch.accelerator.get_memory_info()[1]
