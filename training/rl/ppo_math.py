"""The formulas of PPO, small and pure. Tensors in, tensors out.

Shapes: B responses, T response tokens (padded on the right, mask True where the token counts), N real response tokens
of some rows, one after another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || ref_policy) at each sampled token, in nats, same shape as given: log(policy / ref),
    called k1. It is unbiased for samples from the policy, and as a reward its policy gradient is that of the KL. The
    low-variance k3 = exp(-k1) - 1 + k1 must not be a reward: its gradient is that of another divergence and raises
    this one.

    Source: Schulman 2020, "Approximating KL divergence"; arXiv:2512.21852.
    """
    return logprobs - ref_logprobs


def token_rewards(kl_BT: Tensor, score_B: Tensor, mask_BT: Tensor, kl_coef: float) -> Tensor:
    """Reward of each token [B, T]: -kl_coef * KL everywhere, and the score once, at the last response token.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), eq. 2; Huang et al. 2024 (arXiv:2403.17031).
    """
    reward_BT = torch.where(mask_BT, -kl_coef * kl_BT, 0.0)
    last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return reward_BT.scatter_add(1, last_B1, score_B.unsqueeze(1).to(reward_BT.dtype))


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the tokens that count, a scalar."""
    return torch.where(mask_BT, x_BT, 0.0).sum() / mask_BT.sum()


class PolicyLoss(NamedTuple):
    """Per token, [N]."""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor
    """True where the clipped branch decided."""


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate: max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange_high)), which is 1 + cliprange
    where it is None.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; a higher upper bound: Yu et al. 2025 (DAPO,
    arXiv:2503.14476), section 3.1.
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - cliprange, 1 + (cliprange_high or cliprange))
    return PolicyLoss(torch.maximum(unclipped_N, clipped_N), ratio_N, clipped_N > unclipped_N)


def sequence_policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    cliprange: float,
    cliprange_high: float | None,
    lengths: Sequence[int],
) -> PolicyLoss:
    """The clipped surrogate with one ratio for a response: exp of the mean log-ratio of its tokens, at each of them.
    `lengths` are the tokens of each response. The ratio that is returned is the token's.

    Source: Zheng et al. 2025 (GSPO, arXiv:2507.18071), eq. 5 and 7. The paper's loss is a mean over responses, ours
    over tokens, as with the other losses.
    """
    log_ratio_N = logprobs_N - old_logprobs_N
    mean_N = torch.cat([part.mean().expand(len(part)) for part in log_ratio_N.split(list(lengths))])
    whole = policy_loss(mean_N, torch.zeros_like(mean_N), advantages_N, cliprange, cliprange_high)
    return whole._replace(ratio=log_ratio_N.exp())


def weighted_policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, highest: float
) -> PolicyLoss:
    """-min(ratio, 1 + highest) * A * logprob, the weight without gradient: a token beyond the bound still learns.

    Source: MiniMax 2025 (CISPO, arXiv:2506.13585), eq. 4 and 5, without the lower bound that the paper does not use.
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    weight_N = ratio_N.detach().clamp(max=1 + highest)
    return PolicyLoss(-weight_N * advantages_N * logprobs_N, ratio_N, ratio_N > 1 + highest)


MAX_IMPORTANCE = 2.0


def importance_weights(logprobs_T: Tensor, sampled_logprobs_T: Tensor) -> Tensor:
    """How much more likely each token is to the policy than to the engine that sampled it, at most MAX_IMPORTANCE:
    [T], which multiplies the loss. The bound keeps the variance finite, for a bias where the two differ a lot.

    Source: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", which takes 2.
    """
    return torch.exp(logprobs_T - sampled_logprobs_T).clamp(max=MAX_IMPORTANCE)


class ValueLoss(NamedTuple):
    """Per token, [N]."""

    losses: Tensor
    clipped: Tensor
    """True where the clipped branch decided."""


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, cliprange_value: float) -> ValueLoss:
    """Half the larger squared error of the value and of the value clipped around its old prediction.

    Source: Huang et al. 2024 (arXiv:2403.17031), after openai/baselines ppo2.
    """
    near_N = old_values_N + (values_N - old_values_N).clamp(-cliprange_value, cliprange_value)
    plain_N, clipped_N = (values_N - returns_N) ** 2, (near_N - returns_N) ** 2
    return ValueLoss(0.5 * torch.maximum(plain_N, clipped_N), clipped_N > plain_N)


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: int, episodes: int) -> float:
    """The KL coefficient after a batch of `episodes` whose mean KL per response was `kl` nats: a log-space
    proportional controller.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens that count; 1 is a perfect value model, 0 a constant
    one.
    """
    returns_N, error_N = returns_BT[mask_BT], (returns_BT - values_BT)[mask_BT]
    variance = float(returns_N.var(correction=0))
    return 1 - float(error_N.var(correction=0)) / variance if variance > 0 else 0.0
