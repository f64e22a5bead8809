"""What every phase of the loop's update needs around it: its time, its precision, and the models it
runs whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from training.modeling.models import autocast
from training.process.stage import Stage
from training.process.usage import Work
from training.rl.roles import Roles, whole

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
    """Time a block as the phase `name` of an update; its models compute in the compute type and are
    unsharded meanwhile. Raises KeyError for a name that is not in MODELS.
    """
    runs = [getattr(roles, role) for role in MODELS[name]]
    precision = autocast(stage.params.model, roles.policy.device) if runs else nullcontext()
    with stage.meter.phase(name, update) as work, precision, whole(*runs):
        yield work
