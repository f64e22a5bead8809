"""The roles of the loop (policy, ref_policy, reward_model, and PPO's value_model) at work;
`ppo_layouts` makes them.

Shapes: L tokens of prompt and response, N response tokens one after another, D model width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from config.sections.online import Online, Ppo
from training.distributed import sharding
from training.modeling.adapters import AdapterView, learning, lora_layers, recompute_context
from training.modeling.logprobs import output_weight, token_logprobs
from training.modeling.low_bit import optimizer
from training.modeling.sequences import (
    per_response,
    response_hidden,
    response_targets,
    sequence_logprobs,
)
from training.process.stage import Stage

Role: TypeAlias = PreTrainedModel | AdapterView
"""Both run sequences through `base_model`; a view is one role's of a model that several share."""


MIN_LOSS_SCALE = 1.0
"""Below it a gradient is too large for fp16 without any scaling: training has diverged."""


class Forward(NamedTuple):
    """At the response tokens of some rows, one after another, [N] each."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    """[0] without a critic."""


def learning_rates(settings: Online) -> dict[str, float]:
    """Of the policy, and of a critic where the method has one, in the order of the optimizer's
    parameter groups.
    """
    return {
        "policy": settings.learning_rate,
        **({"value": settings.value_learning_rate} if isinstance(settings, Ppo) else {}),
    }


class Models(NamedTuple):
    """The roles as their layout has them. PPO has one of `value_model` and `trunk_value_head`
    (layout shared_trunk), RLOO and GRPO none.
    """

    policy: Role
    ref_policy: Role
    reward_model: Role
    value_model: Role | None
    trunk_value_head: nn.Linear | None


class Roles:
    """The models of a run and the optimizer of what learns in them."""

    def __init__(
        self, models: Models, settings: Online, dtype: str = "fp32", stage: Stage | None = None
    ) -> None:
        """`dtype` is that of computing: fp16 scales the loss, so that small gradients do not
        vanish.

        `stage` says how models and optimizer are divided among processes; without one they are not.
        """
        self.policy, self.ref_policy, self.reward_model, self.value_model, self.trunk_value_head = (
            models
        )
        value = models.value_model if models.value_model is not None else models.trunk_value_head
        self._learning = {
            "policy": learning(models.policy),
            **({"value": learning(value)} if value is not None else {}),
        }
        modules = [
            *{
                id(module): module
                for role in models
                if role is not None
                for module in _modules(role)
            }.values()
        ]
        for module in modules:
            module.requires_grad_(False)
        for parameter in self.trainable().values():
            parameter.requires_grad_(True)
        sharding.set_root_modules(modules)
        self.lockstep = stage is not None and sharding.shards_weights(stage)
        """All processes must run the same number of passes with gradient, as each takes part in the
        other's.
        """
        groups = [
            {"params": list(self._learning[part].values()), "lr": rate}
            for part, rate in learning_rates(settings).items()
        ]
        self.optimizer = optimizer(settings.optimizer, groups, f"{settings.method}.optimizer")
        self.scaler = torch.amp.GradScaler(models.policy.device.type, enabled=dtype == "fp16")
        self._recomputed = (
            _recomputing([models.policy, models.value_model])
            if settings.activation_checkpointing
            else []
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every parameter that learns, by a name that stays the same from run to run."""
        return {
            f"{part}.{name}": parameter
            for part, found in self._learning.items()
            for name, parameter in found.items()
        }

    def forward(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Online
    ) -> Forward:
        """Log-probs and values of the response tokens, with gradient: one micro-batch."""
        for layer in (
            self._recomputed
        ):  # only layers that train are computed again, and those keep no cache for generation
            layer.train()
        try:
            return sharding.run_as_forward(
                self._working(), lambda: self._forward(sequences, prompt_lengths, settings)
            )
        finally:
            for layer in self._recomputed:
                layer.eval()

    def _working(self) -> list[nn.Module]:
        """The models that learn."""
        roles = [role for role in (self.policy, self.value_model) if role is not None]
        return [*{id(_module(role)): _module(role) for role in roles}.values()]

    def _values_at(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """What the value model's head says before each response token, [N]."""
        model = self.value_model
        assert model is not None
        values_N: Tensor = model.score(response_hidden(model, rows, lengths)).squeeze(-1)
        return values_N

    def _forward(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Online
    ) -> Forward:
        hidden_ND = response_hidden(self.policy, sequences, prompt_lengths)
        targets_N = response_targets(sequences, prompt_lengths).to(hidden_ND.device)
        logprobs_N, entropy_N = token_logprobs(
            hidden_ND, output_weight(self.policy), targets_N, settings.temperature
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
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Online
    ) -> list[Tensor]:
        """Log-probs of each response under the policy as the update computes them, in order."""
        return sequence_logprobs(
            self.policy,
            sequences,
            prompt_lengths,
            settings.temperature,
            settings.micro_batch_tokens,
        )

    @torch.no_grad()
    def ref_logprobs(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Online
    ) -> list[Tensor]:
        """Log-probs of each response under the SFT model, in order."""

        return sequence_logprobs(
            self.ref_policy,
            sequences,
            prompt_lengths,
            settings.temperature,
            settings.micro_batch_tokens,
        )

    @torch.no_grad()
    def values(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], settings: Online
    ) -> list[Tensor]:
        """The value model's prediction before each response token, in order (layout separate)."""
        return per_response(self._values_at, sequences, prompt_lengths, settings.micro_batch_tokens)

    def set_learning_rates(self, settings: Online, progress: float, factor: float = 1.0) -> None:
        """Learning rates at `progress` in [0, 1), times `factor`."""
        factor *= 1 - progress if settings.schedule == "linear" else 1.0
        for group, rate in zip(
            self.optimizer.param_groups, learning_rates(settings).values(), strict=True
        ):
            group["lr"] = rate * factor

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        self.scaler.scale(loss).backward()

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient of policy and of value apart, take an optimizer step unless it is not
        finite; the policy's norm before clipping.

        In fp16 a gradient that is too large for the type halves the loss scale and counts as 0: no
        step is taken.
        """
        self.scaler.unscale_(self.optimizer)
        norms = [
            sharding.clip_gradients(group["params"], max_grad_norm)
            for group in self.optimizer.param_groups
        ]
        is_finite = all(torch.isfinite(norm) for norm in norms)
        if is_finite or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not is_finite and self.scaler.is_enabled() and self.scaler.get_scale() >= MIN_LOSS_SCALE:
            return 0.0
        return float(norms[0]) if torch.isfinite(norms[-1]) else float(norms[-1])


def _module(role: Role | nn.Linear) -> nn.Module:
    module: nn.Module = role.model if isinstance(role, AdapterView) else role
    return module


def _modules(role: Role | nn.Linear) -> list[nn.Module]:
    """What a role is made of: a model, and a head of its own that a view may have."""
    head = (
        [role.score] if isinstance(role, AdapterView) and isinstance(role.score, nn.Module) else []
    )
    return [_module(role), *head]


@contextmanager
def whole(*roles: Role | nn.Linear | None) -> Iterator[None]:
    """Around passes of roles without gradient: their weights are gathered where they are
    divided.
    """
    with sharding.unsharded(
        *[module for role in roles if role is not None for module in _modules(role)]
    ):
        yield


def _recomputing(roles: Sequence[Role | None]) -> list[nn.Module]:
    """Let the layers of the models that learn forget their activations while they train; the
    layers.
    """
    found: dict[int, nn.Module] = {}
    for role in roles:
        if role is None:
            continue
        model: PreTrainedModel = _module(role)
        context = partial(recompute_context, lora_layers(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
        found |= {
            id(module): module
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        }
    return list(found.values())
