"""Models trained by our own loops, with their optimizer: which parameters are trained, and how a gradient becomes a
step.
"""

import math
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
"""Both run sequences through `base_model`; a view is one role of a model shared by several."""


MIN_LOSS_SCALE = 1.0
"""Below this loss scale a gradient is too large for fp16: training has diverged."""


class Learner:
    """The models of a loop, some of them trained."""

    def __init__(
        self,
        roles: Iterable[Role | nn.Linear],
        trained: Mapping[str, Role | nn.Linear],
        rates: Mapping[str, float],
        settings: SamplingLoop,
        dtype: str = "fp32",
        stage: Stage | None = None,
    ) -> None:
        """`trained` names the trained ones among `roles`; `rates` are their initial learning rates. `dtype` is the
        compute type: with fp16 the loss is scaled, so that small gradients do not vanish.

        `stage` determines how models and optimizer are sharded; without it they are not.
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
        """All processes must run the same number of forward and backward passes, as each takes part in the others'
        collectives.
        """
        groups = [{"params": list(self._learning[name].values()), "lr": rate} for name, rate in rates.items()]
        self.optimizer = optimizer(settings.optimizer, groups, f"{settings.method}.optimizer")
        device = next(iter(self.trainable().values())).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16")
        models = [role for role in trained.values() if not isinstance(role, nn.Linear)]
        self._working = [*{id(_module(role)): _module(role) for role in models}.values()]
        self._recomputed = _recomputing(models) if settings.activation_checkpointing else []

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every trained parameter, by a name that is stable between runs."""
        return {
            f"{part}.{name}": parameter
            for part, parameters in self._learning.items()
            for name, parameter in parameters.items()
        }

    def with_gradient(self, forward: Callable[[], T]) -> T:
        """Run `forward`, a pass with gradient through the trained models."""
        # only layers in training mode are recomputed, and those keep no cache for generation
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
        """Backpropagate a micro-batch's loss."""
        self.scaler.scale(loss).backward()

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient of each trained part separately and take an optimizer step if all are finite. Returns the
        first part's norm before clipping.

        In fp16 an overflowing gradient halves the loss scale, and no step is taken; the norm returned is 0.
        """
        self.scaler.unscale_(self.optimizer)
        norms = [sharding.clip_gradients(group["params"], max_grad_norm) for group in self.optimizer.param_groups]
        sizes: list[float] = torch.stack(norms).tolist()
        is_finite = all(map(math.isfinite, sizes))
        if is_finite or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not is_finite and self.scaler.is_enabled() and self.scaler.get_scale() >= MIN_LOSS_SCALE:
            return 0.0
        return sizes[0] if math.isfinite(sizes[-1]) else sizes[-1]


def _module(role: Role | nn.Linear) -> nn.Module:
    module: nn.Module = role.model if isinstance(role, AdapterView) else role
    return module


def modules_of(role: Role | nn.Linear) -> list[nn.Module]:
    """The modules of a role: a model, and the separate head of a view if it has one."""
    head = [role.score] if isinstance(role, AdapterView) and isinstance(role.score, nn.Module) else []
    return [_module(role), *head]


def _recomputing(roles: Sequence[Role]) -> list[nn.Module]:
    """Turn on activation checkpointing in the trained models; returns their layers."""
    modules: dict[int, nn.Module] = {}
    for role in roles:
        model: PreTrainedModel = _module(role)
        context = partial(recompute_context, lora_layers(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
        modules |= {id(module): module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    return list(modules.values())
