"""The record of an alignment method.

Shapes: B responses, those to the same prompt side by side; T response tokens, padded on the right, mask True where the
token counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from config.sections.base import Section
from config.sections.online import ActorCritic

if TYPE_CHECKING:  # estimators use the methods of the tensors they are given
    from torch import Tensor


class Targets(NamedTuple):
    """What an update trains on, [B, T], zero where the mask is False."""

    advantages: Tensor
    returns: Tensor | None
    """Targets of the value function; None without a critic."""


Estimator = Callable[["Tensor", "Tensor", "Tensor | None", "Tensor", Any], Targets]
"""(rewards [B, T], scores [B] as included in the rewards, values [B, T] or None without a critic, mask [B, T], the
method's settings) -> Targets.
"""


@dataclass(frozen=True)
class Method:
    """One value of align.method. Its name is also that of its params section, stage, folder under runs/ and models/,
    and file in config/methods.
    """

    settings: type[Section]
    """The params section. One that samples extends Online, one with a critic ActorCritic."""
    summary: str
    """What it needs, for the report's header: `SFT, reward model, PPO`."""
    choice: str
    """What choosing it means, for the Prefect form and docs/params.md."""
    arxiv: str
    """Number of the paper; methods are listed in this order."""
    advantages: Estimator | None = None
    """Step 5 of the loop in training/ppo.py. None: the method does not sample, and training/<name>.py trains it."""

    @property
    def samples(self) -> bool:
        """Whether it trains on responses that it samples, in the loop of training/ppo.py."""
        return self.advantages is not None

    @property
    def has_critic(self) -> bool:
        return issubclass(self.settings, ActorCritic)


def per_token(advantage_B: Tensor, mask_BT: Tensor) -> Tensor:
    """The advantage of a response at each of its tokens, [B, T], zero where the mask is False."""
    return advantage_B[:, None].where(mask_BT, 0.0)
