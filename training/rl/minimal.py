"""PPO on one page: the loop of training/ppo.py without its infrastructure. Read this first.

Left out: processes, adapters, layouts other than `separate`, checkpoints, engines, packing, out-of-memory handling,
and early stopping (`target_kl`, `max_kl`). Kept: every formula. From the same models, prompts, settings and seed it
follows the trajectory of training/ppo.py; a test compares them.

Schulman et al. 2017 (arXiv:1707.06347) for the update, Ziegler et al. 2019 (arXiv:1909.08593) for rewards from a
language model's KL, Huang et al. 2024 (arXiv:2403.17031) for the details.

Shapes: B responses, L tokens of prompt and response, T response tokens, V vocabulary; padding is on the right, and
masks are True where the token counts.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from config.methods.ppo import Ppo, advantages
from training.rl import ppo_math
from training.rl.episodes import choose_prompts, joined, mini_batches, pad_responses, stream_seed
from training.rollout.engine import draw, sampling_noise

Rows: TypeAlias = tuple[list[list[int]], list[int]]
"""Sequences of prompt and response, and the index where each response starts."""


def minimal_ppo(
    policy: PreTrainedModel,
    ref_policy: PreTrainedModel,
    reward_model: PreTrainedModel,
    value_model: PreTrainedModel,
    prompts: Sequence[list[int]],
    settings: Ppo,
    eos: int,
    seed: int,
) -> Iterator[dict[str, float]]:
    """Train policy and value model; yields means of the rollout after each update.

    Reward and value model are classifiers with one label: `score` is a head on hidden states. Values are in the unit
    of normalised scores.
    """
    rates = settings.learning_rate, settings.value_learning_rate
    groups = [{"params": [*model.parameters()]} for model in (policy, value_model)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    kl_coef = settings.kl.coef
    for update in range(1, settings.updates + 1):
        with torch.no_grad():
            # 1. roll out
            batch = choose_prompts(prompts, settings, seed, update)
            own_seed = stream_seed(seed, "sampling", update)
            noise_BT = sampling_noise(len(batch), settings.max_new_tokens, own_seed)
            pairs = zip(batch, noise_BT, strict=True)
            responses = [sample(policy, *pair, settings.temperature, eos) for pair in pairs]
            rows = joined(batch, responses)
            # 2. score, read at the last token
            last_B1 = torch.tensor([[len(ids) - 1] for ids in rows[0]])
            raw_B = heads(reward_model, rows).gather(1, last_B1).squeeze(1)
            norm = reward_model.config
            score_B = (raw_B - norm.score_mean) / norm.score_std
            ended_B = torch.tensor([response[-1] == eos for response in responses])
            shaped_B = score_B - settings.missing_eos_penalty * ~ended_B
            if settings.score_clip is not None:
                shaped_B = shaped_B.clamp(-settings.score_clip, settings.score_clip)
            # 3. log-probs of the policy and its reference, and values
            logprobs_BT, mask_BT = logprobs(policy, rows, settings.temperature)
            ref_logprobs_BT, _ = logprobs(ref_policy, rows, settings.temperature)
            values_BT, _ = responses_of(heads(value_model, rows), rows)
            # 4. rewards
            kl_BT = ppo_math.kl_per_token(logprobs_BT, ref_logprobs_BT)
            reward_BT = ppo_math.token_rewards(kl_BT, shaped_B, mask_BT, kl_coef)
            # 5. advantages, and returns as targets of the values
            advantages_BT, returns_BT = advantages(reward_BT, shaped_B, values_BT, mask_BT, settings)
            assert returns_BT is not None
        # 6. update
        progress = (update - 1) / settings.updates if settings.schedule == "linear" else 0.0
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - progress)
        for chosen in mini_batches(len(batch), settings, seed, update):
            sequences = [rows[0][i] for i in chosen], [rows[1][i] for i in chosen]
            new_BT, own_BT = logprobs(policy, sequences, settings.temperature)
            new_values_BT, _ = responses_of(heads(value_model, sequences), sequences)
            was_BT, advantage_BT, value_BT, return_BT = (
                x_BT[chosen, : own_BT.shape[1]] for x_BT in (logprobs_BT, advantages_BT, values_BT, returns_BT)
            )
            policy_term = ppo_math.policy_loss(
                new_BT, was_BT, advantage_BT, settings.cliprange, settings.cliprange_high
            )
            cliprange = settings.cliprange_value
            value_term = ppo_math.value_loss(new_values_BT, value_BT, return_BT, cliprange)
            loss = (policy_term.losses + settings.vf_coef * value_term.losses)[own_BT].mean()
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                clip_grad_norm_(group["params"], settings.max_grad_norm)
            optimizer.step()
        # 7. report
        kl = float((logprobs_BT - ref_logprobs_BT).where(mask_BT, 0.0).sum(dim=1).mean())
        if settings.kl.controller == "adaptive":
            kl_coef = ppo_math.adapted_kl_coef(
                kl_coef, kl, settings.kl.target, settings.kl.horizon, settings.batch_size
            )
        lengths_B = mask_BT.sum(dim=1).float()
        value = float(ppo_math.masked_mean(values_BT, mask_BT))
        score, length = float(score_B.mean()), float(lengths_B.mean())
        yield {"score": score, "kl": kl, "length": length, "value": value}


def sample(policy: PreTrainedModel, prompt: list[int], noise_T: Tensor, temperature: float, eos: int) -> list[int]:
    """A response to `prompt`, with a full forward pass per token; an engine would keep a cache."""
    response: list[int] = []
    while len(response) < len(noise_T) and eos not in response:
        logits_1V = policy(torch.tensor([prompt + response])).logits[:, -1]
        uniform_1 = noise_T[len(response)][None]
        response.append(int(draw(logits_1V, uniform_1, temperature)[0]))
    return response


def padded(rows: Rows) -> Tensor:
    """[B, L], padded on the right. In a causal model no token attends to padding behind it, so any token will do."""
    return pad_sequence([torch.tensor(ids) for ids in rows[0]], batch_first=True)


def responses_of(x_BL: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Values at the token before each response token, [B, T], and the mask."""
    return pad_responses([x_L[start - 1 : len(ids) - 1] for x_L, ids, start in zip(x_BL, *rows, strict=True)])


def logprobs(policy: PreTrainedModel, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens [B, T], and their mask."""
    ids_BL = padded(rows)
    logits_BLV = policy(ids_BL).logits[:, :-1].float() / temperature
    found_BL = logits_BLV.log_softmax(dim=2).gather(2, ids_BL[:, 1:, None]).squeeze(2)
    return responses_of(found_BL, rows)


def heads(classifier: PreTrainedModel, rows: Rows) -> Tensor:
    """Head outputs per token, [B, L]."""
    hidden_BLD = classifier.base_model(padded(rows)).last_hidden_state
    outputs_BL: Tensor = classifier.score(hidden_BLD).squeeze(2)
    return outputs_BL
