"""The roles of the loop (policy, ref_policy, reward_model, and a critic's value_model) with their passes;
training/rl/layouts.py makes them.

Shapes: L tokens of prompt and response, N response tokens one after another, D model width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.sections.online import ActorCritic, Online
from training.modeling.logprobs import output_weight, token_logprobs
from training.modeling.sequences import per_response, response_hidden, response_targets, sequence_logprobs
from training.process.stage import Stage
from training.rl.learner import Learner, Role


class Forward(NamedTuple):
    """Results at the response tokens of a micro-batch, one response after another, [N] each."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    """[0] without a critic."""


def learning_rates(settings: Online) -> dict[str, float]:
    """Learning rates of the policy, and of a critic if there is one, in the order of the optimizer's parameter
    groups.
    """
    return {
        "policy": settings.learning_rate,
        **({"value": settings.value_learning_rate} if isinstance(settings, ActorCritic) else {}),
    }


class Models(NamedTuple):
    """The roles as their layout has them. A method with a critic has one of `value_model` and `trunk_value_head`
    (layout shared_trunk), any other neither.
    """

    policy: Role
    ref_policy: Role
    reward_model: Role | None
    """None where a reward function takes its place."""
    value_model: Role | None
    trunk_value_head: nn.Linear | None


class Roles(Learner):
    """The models of a run, and the optimizer of the trained ones."""

    def __init__(self, models: Models, settings: Online, dtype: str = "fp32", stage: Stage | None = None) -> None:
        """See Learner."""
        self.settings = settings
        self.policy, self.ref_policy, self.reward_model, self.value_model, self.trunk_value_head = models
        value = models.value_model if models.value_model is not None else models.trunk_value_head
        super().__init__(
            [role for role in models if role is not None],
            {"policy": models.policy, **({"value": value} if value is not None else {})},
            learning_rates(settings),
            settings,
            dtype,
            stage,
        )

    def forward(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Forward:
        """Log-probs and values of the response tokens, with gradient: one micro-batch."""
        return self.with_gradient(lambda: self._forward(sequences, prompt_lengths))

    def _values_at(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """The value model's prediction before each response token, [N]."""
        model = self.value_model
        assert model is not None
        values_N: Tensor = model.score(response_hidden(model, rows, lengths)).squeeze(-1)
        return values_N

    def _forward(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Forward:
        hidden_ND = response_hidden(self.policy, sequences, prompt_lengths)
        targets_N = response_targets(sequences, prompt_lengths)
        targets_N = targets_N.to(hidden_ND.device, non_blocking=True)
        logprobs_N, entropy_N = token_logprobs(
            hidden_ND, output_weight(self.policy), targets_N, self.settings.temperature
        )
        if self.trunk_value_head is not None:
            values_N = self.trunk_value_head(hidden_ND).squeeze(-1)
        elif self.value_model is not None:
            values_N = self._values_at(sequences, prompt_lengths)
        else:
            values_N = logprobs_N.new_empty(0)
        return Forward(logprobs_N, entropy_N, values_N)

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], budget_tokens: int
    ) -> list[Tensor]:
        """Log-probs of each response under the policy, computed as in the update, in order."""
        return sequence_logprobs(self.policy, sequences, prompt_lengths, self.settings.temperature, budget_tokens)

    @torch.no_grad()
    def ref_logprobs(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], budget_tokens: int
    ) -> list[Tensor]:
        """Log-probs of each response under the SFT model, in order."""

        return sequence_logprobs(self.ref_policy, sequences, prompt_lengths, self.settings.temperature, budget_tokens)

    @torch.no_grad()
    def values(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], budget_tokens: int
    ) -> list[Tensor]:
        """The value model's prediction before each response token, in order (layout separate)."""
        return per_response(self._values_at, sequences, prompt_lengths, budget_tokens)
