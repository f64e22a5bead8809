"""Step 5 of the loop in training/ppo.py: what an update learns from, one estimator a method.

Shapes: B responses, those to one prompt side by side; G responses to a prompt; T response tokens,
padded on the right, mask True where the token counts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config.sections.online import Grpo, Ppo, Rloo
from training.rl.ppo_math import Targets, gae, whiten

Estimator = Callable[[Tensor, Tensor, Tensor | None, Tensor, Any], Targets]
"""(rewards [B, T], scores [B] as they are in the rewards, values [B, T] or None without a critic,
mask [B, T], settings of the method) -> advantages, and returns of a critic.
"""
NO_DIVISION_BY_ZERO = 1e-4
"""Added to a standard deviation of rewards, as TRL does: a group of equal rewards has advantages of
zero.
"""


def ppo_advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Ppo
) -> Targets:
    """Generalised advantage estimation against the critic's values, whitened over the update's
    tokens.
    """
    assert values_BT is not None
    if settings.whiten_rewards:
        reward_BT = whiten(reward_BT, mask_BT, shift_mean=False)
    advantages_BT, returns_BT = gae(reward_BT, values_BT, mask_BT, settings.gamma, settings.lam)
    return Targets(whiten(advantages_BT, mask_BT), returns_BT)


def rloo_advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Rloo
) -> Targets:
    """REINFORCE leave-one-out: every token of a response has the response's advantage."""
    advantage_B = leave_one_out(reward_BT.sum(dim=1), settings.responses_per_prompt)
    if settings.normalise_advantages:
        advantage_B = (advantage_B - advantage_B.mean()) / (advantage_B.std() + NO_DIVISION_BY_ZERO)
    return Targets(on_each_token(advantage_B, mask_BT), None)


def grpo_advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Grpo
) -> Targets:
    """Group relative policy optimisation: every token of a response has the response's advantage,
    its score compared with the group's in standard deviations, and its KL penalty with the group's
    mean. The penalty is not divided by the deviation, which would blow its noise up where the
    scores of a group are nearly equal.
    """
    group = settings.responses_per_prompt
    penalty_B = score_B - reward_BT.sum(dim=1)
    penalty_PG = penalty_B.view(-1, group)
    centred_PG = penalty_PG - penalty_PG.mean(dim=1, keepdim=True)
    advantage_B = group_normalised(score_B, group) - centred_PG.flatten()
    return Targets(on_each_token(advantage_B, mask_BT), None)


def leave_one_out(reward_B: Tensor, group: int) -> Tensor:
    """R_i - mean of R_j over the other responses j to the same prompt, [B]: unbiased, as the
    baseline does not know R_i.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740), section 3.2; Kool et al. 2019, "Buy 4 REINFORCE
    samples, get a baseline for free".
    """
    reward_PG = reward_B.view(-1, group)
    baseline_PG = (reward_PG.sum(dim=1, keepdim=True) - reward_PG) / (group - 1)
    return (reward_PG - baseline_PG).flatten()


def group_normalised(score_B: Tensor, group: int) -> Tensor:
    """(S_i - mean of S_j) / std of S_j over all responses j to the same prompt, [B].

    Known biases (Liu et al. 2025, arXiv:2503.20783):
    - difficulty: dividing by the deviation gives prompts whose responses hardly differ, those too
      easy or too hard, as much weight as the others. RLOO does not divide.
    - length: the paper's loss is a mean over the tokens of each response, then over responses, so
      that long bad responses are punished less per token. Ours is a mean over all tokens of a
      mini-batch (as in DAPO, arXiv:2503.14476), which has no such bias.

    The mean knows S_i, which scales the expected gradient by (G - 1) / G and leaves its direction
    alone. Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    score_PG = score_B.view(-1, group)
    centred_PG = score_PG - score_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (score_PG.std(dim=1, keepdim=True) + NO_DIVISION_BY_ZERO)).flatten()


def on_each_token(advantage_B: Tensor, mask_BT: Tensor) -> Tensor:
    """A response's advantage on each of its tokens, [B, T], zero where the mask is False."""
    return torch.where(mask_BT, advantage_B[:, None], 0.0)


def equal_groups(score_B: Tensor, group: int) -> float:
    """Share of the prompts whose responses all have one score: from their scores nothing can be
    learnt.
    """
    score_PG = score_B.view(-1, group)
    return float((score_PG == score_PG[:, :1]).all(dim=1).float().mean())
