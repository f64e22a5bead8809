"""Models that learn in a loop of ours, with their optimizer: which of their parameters learn, how a
gradient becomes a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from config.sections.online import SamplingLoop
from training.distributed import sharding
from training.modeling.adapters import AdapterView, learning, lora_layers, recompute_context
from training.modeling.low_bit import optimizer
from training.process.stage import Stage

T = TypeVar("T")
Role: TypeAlias = PreTrainedModel | AdapterView
"""Both run sequences through `base_model`; a view is one role's of a model that several share."""


MIN_LOSS_SCALE = 1.0
"""Below it a gradient is too large for fp16 without any scaling: training has diverged."""


class Learner:
    """The models of a loop, of which some learn."""

    def __init__(
        self,
        roles: Iterable[Role | nn.Linear],
        trained: Mapping[str, Role | nn.Linear],
        rates: Mapping[str, float],
        settings: SamplingLoop,
        dtype: str = "fp32",
        stage: Stage | None = None,
    ) -> None:
        """`trained` are those of `roles` that learn, by a name each; `rates` are their learning
        rates at the start. `dtype` is that of computing: fp16 scales the loss, so that small
        gradients do not vanish.

        `stage` says how models and optimizer are divided among processes; without one they are not.
        """
        self._learning = {name: learning(role) for name, role in trained.items()}
        self._rates, self._schedule = dict(rates), settings.schedule
        modules = [*{id(module): module for role in roles for module in modules_of(role)}.values()]
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
            {"params": list(self._learning[name].values()), "lr": rate}
            for name, rate in rates.items()
        ]
        self.optimizer = optimizer(settings.optimizer, groups, f"{settings.method}.optimizer")
        device = next(iter(self.trainable().values())).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16")
        models = [role for role in trained.values() if not isinstance(role, nn.Linear)]
        self._working = [*{id(_module(role)): _module(role) for role in models}.values()]
        self._recomputed = _recomputing(models) if settings.activation_checkpointing else []

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every parameter that learns, by a name that stays the same from run to run."""
        return {
            f"{part}.{name}": parameter
            for part, found in self._learning.items()
            for name, parameter in found.items()
        }

    def with_gradient(self, forward: Callable[[], T]) -> T:
        """What `forward` gives, a pass with gradient through the models that learn."""
        # only layers that train are computed again, and those keep no cache for generation
        for layer in self._recomputed:
            layer.train()
        try:
            return sharding.run_as_forward(self._working, forward)
        finally:
            for layer in self._recomputed:
                layer.eval()

    def set_learning_rates(self, progress: float, factor: float = 1.0) -> None:
        """Learning rates at `progress` in [0, 1), times `factor`."""
        factor *= 1 - progress if self._schedule == "linear" else 1.0
        for group, rate in zip(self.optimizer.param_groups, self._rates.values(), strict=True):
            group["lr"] = rate * factor

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        self.scaler.scale(loss).backward()

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient of each part that learns apart, take an optimizer step unless it is not
        finite; the first part's norm before clipping.

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


def modules_of(role: Role | nn.Linear) -> list[nn.Module]:
    """What a role is made of: a model, and a head of its own that a view may have."""
    head = (
        [role.score] if isinstance(role, AdapterView) and isinstance(role.score, nn.Module) else []
    )
    return [_module(role), *head]


def _recomputing(roles: Sequence[Role]) -> list[nn.Module]:
    """Let the layers of the models that learn forget their activations while they train; the
    layers.
    """
    found: dict[int, nn.Module] = {}
    for role in roles:
        model: PreTrainedModel = _module(role)
        context = partial(recompute_context, lora_layers(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
        found |= {
            id(module): module
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        }
    return list(found.values())
