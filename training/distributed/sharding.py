"""Sharding of weights, gradients and optimizer state over a stage's processes, by `sharding` in params.yaml; results
do not change.

none    every process holds all
zero2   the optimizer's state, gradients, and weights between two steps: whole from a step's first
        forward on
        torch's FSDP2, weights kept
zero3   also weights in use: each layer's are gathered for its forward and for its backward
        torch's FSDP2

A model is divided layer by layer, and what is not in a layer (embedding, last norm, head) together. What looks at
weights outside of the model's own forward does so `inside` it, or while it is `gathered`. All processes must divide,
gather and go `inside` at the same points. Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5; Zhao et al.
2023 (arXiv:2304.11277).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from config.sections.where import WEIGHTS_DIVIDED
from training.process.stage import Stage

T = TypeVar("T")


def level(stage: Stage) -> str:
    """How the stage shards its models: `none` for a single process, whatever params.yaml says."""
    return stage.params.where.of(stage.name).sharding if stage.world_size > 1 else "none"


def shards_weights(stage: Stage) -> bool:
    return level(stage) in WEIGHTS_DIVIDED


def is_divided(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


# ---------------------------------------------------------------- weights


def shard(module: nn.Module, stage: Stage, sums_gradients: bool = False) -> None:
    """Move a model to the stage's device: all of it, or with zero2 and zero3 this process's shard.

    Gradients are means over the processes, as in DDP, or `sums_gradients`. Which parameters learn may still change,
    until `set_root_modules`.
    """
    device = stage.torch_device.type
    if not shards_weights(stage):
        module.to(stage.torch_device)
        return
    everybody = dist.group.WORLD
    assert everybody is not None
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(everybody, device),
        "reshard_after_forward": level(stage) == "zero3",
    }
    if stage.params.where.of(stage.name).offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    for part in [*[part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)], module]:
        divided: Any = fully_shard(part, **options)
        if sums_gradients:
            divided.set_gradient_divide_factor(1.0)
            # gloo lacks the operation that any factor but the mean's needs
            divided.set_force_sum_reduction_for_comms(True)
    divided.keeps_weights = level(stage) == "zero2"
    divided.inside = MethodType(_work_inside, divided)
    register_fsdp_forward_method(divided, "inside")


def set_root_modules(modules: Iterable[nn.Module]) -> None:
    """Make each sharded model the root of its layers, whichever part runs first. Trained parameters must be known by
    now.
    """
    for module in modules:
        if is_divided(module):
            run_as_forward([module], lambda: None)
            reshard(module)


def _work_inside(module: nn.Module, work: Callable[[], T]) -> T:
    # a view would lose the hook that gathers the weights again for the backward pass
    return tree_map_only(Tensor, torch.clone, work())


def run_as_forward(modules: Iterable[nn.Module], work: Callable[[], T]) -> T:
    """Run `work` as if it were the forward of these models: their embeddings, last norms and heads are unsharded
    meanwhile. Returns its result.

    Tensors in the result that need a gradient may be used in one backward pass.
    """
    divided: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]
    for module in divided:
        work = partial(module.inside, work)
    return work()


@contextmanager
def unsharded(*modules: nn.Module | None) -> Iterator[None]:
    """Keep these models unsharded, for passes without gradient whose number differs between processes."""
    divided: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]
    for module in divided:
        module.set_reshard_after_forward(False)
        for part in _parts(module):
            part.unshard()
    try:
        yield
    finally:
        for module in divided:
            module.set_reshard_after_forward(not module.keeps_weights)
            reshard(module)


def _parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Free gathered weights, so that parameters are sharded again."""
    for part in _parts(module):
        part.reshard()


def learning_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters of a model by name: of a sharded model its sharded parameters."""
    reshard(module)
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


# ---------------------------------------------------------------- gradients


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
