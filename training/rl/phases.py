"""What a phase of an update needs around it: its usage row, its compute type, whole models."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from training.distributed import sharding
from training.modeling.models import autocast
from training.process.stage import Stage
from training.process.usage import Work
from training.rl.learner import Role, modules_of


@contextmanager
def in_phase(stage: Stage, update: int, name: str, *models: Role | nn.Linear | None) -> Iterator[Work]:
    """Time a block as the phase `name` of an update.

    `models` are those that it runs without gradient: they compute in the compute type and are unsharded meanwhile;
    None stands for one that the layout does not have. The update itself names none: it enters autocast around its
    forward passes.
    """
    precision = autocast(stage.params.model, stage.torch_device) if models else nullcontext()
    modules = [module for model in models if model is not None for module in modules_of(model)]
    with stage.meter.phase(name, update) as work, precision, sharding.unsharded(*modules):
        yield work
