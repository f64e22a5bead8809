"""GRPO: group relative policy optimisation. No critic: the responses to a prompt are compared with each other.

    S_i = score_i - penalties
    A_i = (S_i - mean of S_j) / std of S_j - kl_coef * (KL_i - mean of KL_j) over all responses j to the same prompt,
    at each token of i

The paper has the KL penalty as a term of the loss; here its gradient comes with the advantage, on the same scale.
Source: Shao et al. 2024 (arXiv:2402.03300).

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
"""Added to the standard deviation, as in TRL: a group of equal scores has advantages of zero."""


class Grpo(Grouped):
    """Group relative policy optimisation: the responses to a prompt are compared with their mean, in units of their
    deviation.
    """

    method: ClassVar[str] = "grpo"

    responses_per_prompt: GroupSize = Field(
        description="Responses drawn from each prompt, the group that each is compared with; must divide the batch."
    )
    grpo_epochs: Positive = Field(description="Passes over each rollout.")
    divide_by_deviation: bool = Field(
        description="Divide a group's scores by their standard deviation; false is Dr. GRPO, where easy and hard "
        "prompts do not weigh more than others."
    )


def advantages(
    reward_BT: Tensor, score_B: Tensor, values_BT: Tensor | None, mask_BT: Tensor, settings: Grpo
) -> Targets:
    """Each score relative to its group in standard deviations, and each KL penalty relative to the group's mean.

    The penalty is not divided by the deviation: where the scores of a group are nearly equal, that would amplify its
    noise.
    """
    group = settings.responses_per_prompt
    penalty_B = score_B - reward_BT.sum(dim=1)
    penalty_PG = penalty_B.view(-1, group)
    centred_PG = penalty_PG - penalty_PG.mean(dim=1, keepdim=True)
    advantage_B = group_normalised(score_B, group, settings.divide_by_deviation) - centred_PG.flatten()
    return Targets(per_token(advantage_B, mask_BT), None)


def group_normalised(score_B: Tensor, group: int, divide: bool = True) -> Tensor:
    """(S_i - mean of S_j) / std of S_j over all responses j to the same prompt, [B]; without `divide` the numerator.

    Known biases (Liu et al. 2025, arXiv:2503.20783):
    - difficulty: dividing by the deviation gives prompts whose responses hardly differ, those too
      easy or too hard, as much weight as the others. Without `divide` and in RLOO it is not there.
    - length: the paper's loss is a mean over the tokens of each response, then over responses, so
      that long bad responses are punished less per token. Ours is a mean over all tokens of a mini-batch (as in DAPO,
      arXiv:2503.14476), which has no such bias.

    The mean includes S_i, which scales the expected gradient by (G - 1) / G and does not change its direction. Source:
    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    score_PG = score_B.view(-1, group)
    centred_PG = score_PG - score_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (score_PG.std(dim=1, keepdim=True) + EPSILON) if divide else centred_PG).flatten()


METHOD = Method(
    settings=Grpo,
    summary="SFT, reward model, GRPO (no critic)",
    choice="as rloo, with advantages in standard deviations of the group",
    arxiv="2402.03300",
    advantages=advantages,
)
