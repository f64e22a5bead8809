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
}
"""The roles that a phase runs without gradient. The other phases enter autocast where they run a
model, or run none.
"""


@contextmanager
def in_phase(stage: Stage, roles: Roles, update: int, name: str) -> Iterator[Work]:
    """Time a block as the phase `name` of an update; its models compute in the compute type and are
    unsharded meanwhile.
    """
    runs = [getattr(roles, role) for role in MODELS.get(name, ())]
    precision = autocast(stage.params.model, roles.policy.device) if runs else nullcontext()
    with stage.meter.phase(name, update) as work, precision, whole(*runs):
        yield work
