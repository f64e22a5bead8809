"""RLOO: REINFORCE leave-one-out. No critic: the other responses to a prompt are the baseline.

    R_i = score_i - penalties - kl_coef * KL_i
    A_i = R_i - mean of R_j over the other responses j to the same prompt, at each token of i

Shapes: config/methods/method.py; P prompts, G responses to each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from config.methods.method import Method, Targets, per_token
from config.sections.base import Positive
from config.sections.online import Grouped, GroupSize

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation, which is 0 where all advantages are equal."""


class Rloo(Grouped):
    """REINFORCE leave-one-out of the SFT model against the reward model: the other responses to a prompt are the
    baseline.
    """

    method: ClassVar[str] = "rloo"

    responses_per_prompt: GroupSize = Field(
        description="Responses drawn from each prompt, each the baseline of the others; must divide the batch."
    )
    rloo_epochs: Positive = Field(description="Passes over each rollout.")
    normalise_advantages: bool = Field(
        description="Scale the advantages of an update to mean 0 and standard deviation 1."
    )


def advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Rloo
) -> Targets:
    """The leave-one-out advantage of each response, at each of its tokens."""
    advantage_B = leave_one_out(reward_BT.sum(dim=1), settings.responses_per_prompt)
    if settings.normalise_advantages:
        advantage_B = (advantage_B - advantage_B.mean()) / (advantage_B.std() + EPSILON)
    return Targets(per_token(advantage_B, mask_BT), None)


def leave_one_out(reward_B: Tensor, group: int) -> Tensor:
    """R_i - mean of R_j over the other responses j to the same prompt, [B]. Unbiased, as the baseline does not depend
    on R_i.

    Source: Ahmadian et al. 2024 (arXiv:2402.14740), section 3.2; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free".
    """
    reward_PG = reward_B.view(-1, group)
    baseline_PG = (reward_PG.sum(dim=1, keepdim=True) - reward_PG) / (group - 1)
    return (reward_PG - baseline_PG).flatten()


METHOD = Method(
    settings=Rloo,
    summary="SFT, reward model, RLOO (no critic)",
    choice="the loop of PPO without a critic, several responses to each prompt",
    arxiv="2402.14740",
    advantages=advantages,
)
