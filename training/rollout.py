"""Sampling responses: the `static` engine, a KV cache over a batch that shrinks as responses end.

Shapes: B responses, P prompt tokens, T response tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from training.batching import pad_left
from training.logprobs import output_weight

SHRINK_FRACTION = 0.1
"""Ended responses leave the cache when they are more than this share of it: each shrink copies the cache once."""


class Rollout(NamedTuple):
    """Responses in the order of their prompts."""

    responses: list[list[int]]
    """Token ids, the end-of-sequence token included where it was sampled."""
    logprobs: list[Tensor]
    """Log-probability of each token under the distribution it was sampled from."""
    values: list[Tensor] | None
    """What `value_head` said before each token, if one was given."""


class Limits(NamedTuple):
    """When a response ends, and what fills a batch."""

    max_new_tokens: int
    eos: int
    pad: int


def sampling_noise(responses: int, max_new_tokens: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), [B, T]: the whole randomness of a rollout.

    Each response owns its row, so what is sampled for it does not depend on which batch or process it is in.
    """
    return torch.rand(responses, max_new_tokens, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    noise_BT: Tensor | None,
    temperature: float,
    limits: Limits,
    batch_size: int,
    value_head: nn.Linear | None = None,
) -> Rollout:
    """Sample one response to each of `prompts` [B]; equal neighbours share the prompt's computation.

    `noise_BT` None decodes greedily. Prompts of like length go side by side, `batch_size` at a time.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i]))
    responses: list[list[int]] = [[] for _ in prompts]
    logprobs: list[Tensor] = [torch.empty(0)] * len(prompts)
    values: list[Tensor] = [torch.empty(0)] * len(prompts)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        noise = None if noise_BT is None else noise_BT[rows]
        ids_BT, logprobs_BT, values_BT, lengths = _generate_batch(model, [prompts[i] for i in rows], noise, temperature, limits, value_head)
        for place, i in enumerate(rows):
            responses[i] = ids_BT[place, : lengths[place]].tolist()
            logprobs[i] = logprobs_BT[place, : lengths[place]].clone()
            values[i] = values_BT[place, : lengths[place]].clone()
    return Rollout(responses, logprobs, values if value_head is not None else None)


def _generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    noise_BT: Tensor | None,
    temperature: float,
    limits: Limits,
    value_head: nn.Linear | None,
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Token ids, log-probabilities and values [B, T], and the lengths."""
    device = model.device
    hidden_BD, cache, mask_BL = _prefill(model, prompts, limits.pad)
    ids_BT = torch.full((len(prompts), limits.max_new_tokens), limits.pad)
    logprobs_BT, values_BT = torch.zeros(ids_BT.shape), torch.zeros(ids_BT.shape)
    lengths = torch.zeros(len(prompts), dtype=torch.long)
    live = torch.arange(len(prompts))  # rows of the cache -> rows of the batch
    position_B = mask_BL.sum(dim=1)
    weight_VD = output_weight(model)
    running = torch.ones(len(prompts), dtype=torch.bool)
    for t in range(limits.max_new_tokens):
        log_softmax = torch.log_softmax((hidden_BD @ weight_VD.to(hidden_BD.dtype).T).float() / (temperature or 1.0), dim=-1)
        uniform = None if noise_BT is None else noise_BT[live, t].to(device)
        token_B = _pick(log_softmax, uniform)
        rows, tokens = live[running], token_B.cpu()[running]
        ids_BT[rows, t] = tokens
        logprobs_BT[rows, t] = log_softmax.gather(1, token_B[:, None]).squeeze(1).cpu()[running]
        if value_head is not None:
            values_BT[rows, t] = value_head(hidden_BD).squeeze(-1).float().cpu()[running]
        lengths[rows] += 1
        running = running & (token_B.cpu() != limits.eos)
        if not running.any() or t + 1 == limits.max_new_tokens:
            break
        if (~running).sum() > SHRINK_FRACTION * len(running):
            keep = running.nonzero().squeeze(1)
            kept = keep.to(device)
            cache.batch_select_indices(kept)
            token_B, mask_BL, position_B = token_B[kept], mask_BL[kept], position_B[kept]
            live, running = live[keep], running[keep]
        mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(mask_BL), 1)], dim=1)
        hidden_BD = model.base_model(
            input_ids=token_B[:, None], attention_mask=mask_BL, position_ids=position_B[:, None], past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        position_B = position_B + 1
    return ids_BT, logprobs_BT, values_BT, lengths.tolist()


def _prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, DynamicCache, Tensor]:
    """Last hidden state [B, D], cache and mask [B, P] of the prompts; a prompt that repeats is computed once."""
    unique: list[Sequence[int]] = []
    source = []
    for i, prompt in enumerate(prompts):
        if not i or list(prompt) != list(prompts[i - 1]):
            unique.append(prompt)
        source.append(len(unique) - 1)
    ids_BP, mask_BP = pad_left(unique, pad)
    ids_BP, mask_BP = ids_BP.to(model.device), mask_BP.to(model.device)
    position_BP = (mask_BP.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    hidden_BD = model.base_model(
        input_ids=ids_BP, attention_mask=mask_BP, position_ids=position_BP, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
    if len(unique) < len(prompts):
        index = torch.tensor(source, device=model.device)
        cache.batch_select_indices(index)
        hidden_BD, mask_BP = hidden_BD[index], mask_BP[index]
    return hidden_BD, cache, mask_BP


def _pick(log_softmax_BV: Tensor, uniform_B: Tensor | None) -> Tensor:
    """The token [B] at which the cumulative probability passes `uniform_B`; the most likely one if None."""
    if uniform_B is None:
        return log_softmax_BV.argmax(dim=-1)
    cumulative_BV = log_softmax_BV.exp().cumsum(dim=-1)
    # The total may miss 1 by rounding: scale the draw, so that it always falls on a token of positive probability.
    threshold_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1).clamp(max=log_softmax_BV.shape[1] - 1)
