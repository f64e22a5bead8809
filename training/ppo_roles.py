"""The four roles of PPO (policy, ref_policy, reward_model, value_model) in their layouts.

separate      four models.
shared_trunk  the value model is a head on the policy's trunk: one forward gives log-probs and values.

Shapes: L tokens of prompt and response, N response tokens one after another, D model width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.schema import Ppo
from training.logprobs import output_weight, token_logprobs
from training.models import init_head, load_policy, load_reward_model, new_reward_model
from training.sequences import per_response, response_hidden, response_targets, sequence_logprobs
from training.stage import Stage


class Forward(NamedTuple):
    """At the response tokens of some rows, one after another, [N] each."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


class Roles:
    """The models of a run and the optimizer of those that learn."""

    def __init__(
        self, policy: PreTrainedModel, ref_policy: PreTrainedModel, reward_model: PreTrainedModel, value_model: PreTrainedModel | None,
        trunk_value_head: nn.Linear | None, settings: Ppo,
    ) -> None:  # fmt: skip
        """Exactly one of `value_model` (layout separate) and `trunk_value_head` (layout shared_trunk) is given."""
        self.policy = policy
        self.ref_policy = ref_policy.requires_grad_(False)
        self.reward_model = reward_model.requires_grad_(False)
        self.value_model = value_model
        self.trunk_value_head = trunk_value_head
        value = value_model if value_model is not None else trunk_value_head
        assert value is not None
        groups = [
            {"params": list(policy.parameters()), "lr": settings.learning_rate},
            {"params": list(value.parameters()), "lr": settings.value_learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every parameter that learns, by a name that stays the same from run to run."""
        value = self.value_model if self.value_model is not None else self.trunk_value_head
        parts = {"policy": self.policy, "value": value}
        return {f"{part}.{name}": parameter for part, module in parts.items() for name, parameter in module.named_parameters()}

    def forward(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Ppo) -> Forward:
        """Log-probs and values of the response tokens, with gradient: one micro-batch."""
        hidden_ND = response_hidden(self.policy, sequences, prompt_lengths)
        targets_N = response_targets(sequences, prompt_lengths).to(hidden_ND.device)
        logprobs_N, entropy_N = token_logprobs(hidden_ND, output_weight(self.policy), targets_N, settings.temperature)
        if self.trunk_value_head is not None:
            values_N = self.trunk_value_head(hidden_ND).squeeze(-1)
        else:
            assert self.value_model is not None
            values_N = self.value_model.score(response_hidden(self.value_model, sequences, prompt_lengths)).squeeze(-1)
        return Forward(logprobs_N, entropy_N, values_N.float())

    @torch.no_grad()
    def ref_logprobs(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Ppo) -> list[Tensor]:
        """Log-probs of each response under the SFT model, in order."""

        return sequence_logprobs(self.ref_policy, sequences, prompt_lengths, settings.temperature, settings.micro_batch_tokens)

    @torch.no_grad()
    def values(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Ppo) -> list[Tensor]:
        """The value model's prediction before each response token, in order (layout separate)."""
        model = self.value_model
        assert model is not None

        def of_rows(rows: list[Sequence[int]], lengths: list[int]) -> Tensor:
            values_N: Tensor = model.score(response_hidden(model, rows, lengths)).squeeze(-1)
            return values_N.float()

        return per_response(of_rows, sequences, prompt_lengths, settings.micro_batch_tokens)

    def set_learning_rates(self, settings: Ppo, progress: float) -> None:
        """Learning rates at `progress` in [0, 1)."""
        factor = 1 - progress if settings.schedule == "linear" else 1.0
        self.optimizer.param_groups[0]["lr"] = settings.learning_rate * factor
        self.optimizer.param_groups[1]["lr"] = settings.value_learning_rate * factor

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient of policy and of value apart, take an optimizer step unless it is not finite; the policy's norm before clipping."""
        norms = [torch.nn.utils.clip_grad_norm_(group["params"], max_grad_norm) for group in self.optimizer.param_groups]
        if all(torch.isfinite(norm) for norm in norms):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norms[0]) if torch.isfinite(norms[1]) else float(norms[1])


def load_roles(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Roles:
    """The roles of `ppo.layout`, from models/sft and models/reward.

    Raises ModelError if either is missing, damaged or of another vocabulary.
    """
    params, settings = stage.params, stage.params.ppo
    sft, reward = stage.root / "models/sft", stage.root / "models/reward"
    device = "cpu" if stage.device == "cpu" else "cuda"
    policy, ref_policy = (load_policy(sft, params.model, tokenizer, trainable).to(device).eval() for trainable in (True, False))
    reward_model = load_reward_model(reward, params.model, tokenizer).to(device).eval()
    value_model = head = None
    if settings.layout == "shared_trunk":
        head = nn.Linear(policy.config.hidden_size, 1, bias=False, device=device)
        init_head(head, params.seed)
    elif settings.value_init == "reward":
        value_model = load_reward_model(reward, params.model, tokenizer, trainable=True).to(device).eval()
    else:
        value_model = new_reward_model(sft, params.model, tokenizer, params.seed).to(device).eval()
    return Roles(policy, ref_policy, reward_model, value_model, head, settings)
