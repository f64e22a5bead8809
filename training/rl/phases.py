"""What every phase of the loop's update needs around it: its time, its precision, and the models it
runs whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn

from training.distributed import sharding
from training.modeling.models import autocast
from training.process.stage import Stage
from training.process.usage import Work
from training.rl.learner import Role, modules_of
from training.rl.roles import Roles

MODELS: dict[str, tuple[str, ...]] = {
    "rollout": ("policy", "trunk_value_head"),
    "logprobs": ("policy",),
    "score": ("reward_model",),
    "reference": ("ref_policy",),
    "value": ("value_model",),
    "advantage": (),
    "update": (),
    "save": (),
}
"""Phase -> the roles that it runs without gradient. `update` enters autocast around its forward
passes, the phases after it run no model.
"""


@contextmanager
def in_phase(stage: Stage, roles: Roles, update: int, name: str) -> Iterator[Work]:
    """Time a block as the phase `name` of an update. Raises KeyError for a name that is not in
    MODELS.
    """
    with running(stage, [getattr(roles, role) for role in MODELS[name]], update, name) as work:
        yield work


@contextmanager
def running(
    stage: Stage, roles: Sequence[Role | nn.Linear | None], update: int, name: str
) -> Iterator[Work]:
    """Time a block as the phase `name` of an update; the roles that it runs without gradient
    compute in the compute type and are unsharded meanwhile.
    """
    precision = autocast(stage.params.model, stage.torch_device) if roles else nullcontext()
    modules = [module for role in roles if role is not None for module in modules_of(role)]
    with stage.meter.phase(name, update) as work, precision, sharding.unsharded(*modules):
        yield work
