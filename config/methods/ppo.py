"""PPO: proximal policy optimisation, whose advantages come from a critic.

Source: Schulman et al. 2017 (arXiv:1707.06347); for language models Ziegler et al. 2019 (arXiv:1909.08593) and Huang
et al. 2024 (arXiv:2403.17031).

Shapes: config/methods/method.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from config.methods.method import Method, Targets
from config.sections.base import Fraction, Positive
from config.sections.online import ActorCritic

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(ActorCritic):
    """Proximal policy optimisation of the SFT model against the reward model."""

    method: ClassVar[str] = "ppo"

    ppo_epochs: Positive = Field(description="Passes over each rollout.")
    gamma: Fraction = Field(description="Discount per token.")
    lam: Fraction = Field(description="GAE lambda.")
    whiten_rewards: bool = Field(description="Scale per-token rewards to unit variance before GAE.")


def advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Ppo
) -> Targets:
    """Generalised advantage estimation, whitened over the tokens of the update."""
    assert values_BT is not None
    if settings.whiten_rewards:
        reward_BT = whiten(reward_BT, mask_BT, shift_mean=False)
    advantages_BT, returns_BT = gae(reward_BT, values_BT, mask_BT, settings.gamma, settings.lam)
    return Targets(whiten(advantages_BT, mask_BT), returns_BT)


def gae(reward_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Targets:
    """Generalised advantage estimation: A_t = sum_k (gamma * lam)^k delta_(t+k), delta_t = r_t + gamma * V_(t+1) -
    V_t.

    The value after the last token is zero. returns = advantages + values. lam=0 is the TD error; gamma=lam=1 is return
    minus value.
    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.
    """
    values_BT = values_BT.where(mask_BT, 0.0)
    advantages_BT = values_BT.new_zeros(values_BT.shape)
    next_value_B = values_BT.new_zeros(len(values_BT))
    next_advantage_B = next_value_B
    for t in reversed(range(values_BT.shape[1])):
        delta_B = reward_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = (delta_B + gamma * lam * next_advantage_B).where(mask_BT[:, t], 0.0)
        advantages_BT[:, t] = next_advantage_B = advantage_B
        next_value_B = values_BT[:, t]
    return Targets(advantages_BT, (advantages_BT + values_BT).where(mask_BT, 0.0))


def whiten(x_BT: Tensor, mask_BT: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to variance 1 under the mask, and shift to mean 0 unless `shift_mean` is False; zero where the mask is
    False.
    """
    count = mask_BT.sum()
    mean = x_BT.where(mask_BT, 0.0).sum() / count
    variance = ((x_BT - mean) ** 2).where(mask_BT, 0.0).sum() / count
    whitened_BT = (x_BT - mean) * (variance + 1e-8).rsqrt()
    return (whitened_BT if shift_mean else whitened_BT + mean).where(mask_BT, 0.0)


METHOD = Method(
    settings=Ppo,
    summary="SFT, reward model, PPO",
    choice="policy and critic",
    arxiv="1707.06347",
    advantages=advantages,
)
