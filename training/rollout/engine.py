"""The interface of rollout engines, their randomness, and how a token is drawn.

static  training/rollout/static.py: a batch that shrinks as responses end.
paged   training/rollout/paged.py: Transformers' continuous batching, which refills the batch as
        responses end.
vllm    training/rollout/vllm.py: a vLLM server beside this process.

The first two draw with the same random numbers, so they give the same responses up to rounding; vLLM draws with its
own, from a seed for each response.

Shapes: B responses, T response tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.modeling.adapters import AdapterView

BLOCK = 256
"""Vocabulary entries summed in a block before single ones are considered."""


class Rollout(NamedTuple):
    """Responses in the order of their prompts."""

    responses: list[list[int]]
    """Token ids, the end-of-sequence token included where it was sampled."""
    logprobs: list[Tensor]
    """Log-probability of each token under the distribution it was sampled from."""
    values: list[Tensor] | None
    """Outputs of `value_head` before each token, if one was given."""


class Limits(NamedTuple):
    """When a response ends, and the padding token."""

    max_new_tokens: int
    eos: int
    pad: int


class Engine(Protocol):
    """Samples one response to each of `prompts` [B]; equal neighbours share the prompt's prefill.

    `noise_BT` None decodes greedily. `batch_size` responses are generated in parallel.
    """

    def __call__(
        self,
        model: PreTrainedModel | AdapterView,
        prompts: Sequence[Sequence[int]],
        noise_BT: Tensor | None,
        temperature: float,
        limits: Limits,
        batch_size: int,
        value_head: nn.Linear | None = None,
    ) -> Rollout: ...


def sampling_noise(responses: int, max_new_tokens: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), [B, T]: all randomness of a rollout.

    Each response has its own row, so its sample does not depend on batch, process or engine.
    """
    return torch.rand(responses, max_new_tokens, generator=torch.Generator().manual_seed(seed))


def draw(logits_BV: Tensor, uniform_B: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities [B] under softmax(logits / temperature).

    The token at which the cumulative probability passes `uniform_B`; the most likely one if None (temperature 0 then
    counts as 1).
    """
    probability_BV = torch.softmax(logits_BV.float() / (temperature or 1.0), dim=1)
    token_B1 = (
        probability_BV.argmax(dim=1, keepdim=True)
        if uniform_B is None
        else _invert(probability_BV, uniform_B[:, None])
    )
    return token_B1[:, 0], probability_BV.gather(1, token_B1).log()[:, 0]


def _invert(probability_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """The token where the cumulative sum passes `uniform_B1`, [B, 1], always one of positive probability.

    A cumulative sum over a long vocabulary costs more than the logits: block sums find the block, a cumulative sum
    within it the token.
    """
    vocabulary = probability_BV.shape[1]
    whole = vocabulary // BLOCK * BLOCK
    sums = [
        probability_BV[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=2),
        probability_BV[:, whole:].sum(dim=1, keepdim=True),
    ]
    cumulative_BN = torch.cat(sums, dim=1).cumsum(dim=1)
    threshold_B1 = _below(uniform_B1 * cumulative_BN[:, -1:], cumulative_BN[:, -1:])
    block_B1 = torch.searchsorted(cumulative_BN, threshold_B1, right=True)
    before_B1 = torch.where(block_B1 > 0, cumulative_BN.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    token_BK = block_B1 * BLOCK + torch.arange(BLOCK, device=block_B1.device)
    inside_BK = torch.where(
        token_BK < vocabulary, probability_BV.gather(1, token_BK.clamp(max=vocabulary - 1)), 0.0
    ).cumsum(dim=1)
    return block_B1 * BLOCK + torch.searchsorted(
        inside_BK, _below(threshold_B1 - before_B1, inside_BK[:, -1:]), right=True
    )


def _below(threshold_B1: Tensor, total_B1: Tensor) -> Tensor:
    """`threshold_B1` clamped into [0, total): rounding may move it outside, where no token has positive
    probability.
    """
    return threshold_B1.clamp(min=0.0).minimum(torch.nextafter(total_B1, torch.zeros_like(total_B1)))
