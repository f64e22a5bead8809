"""What a run of PPO, RLOO or GRPO carries from update to update, besides the weights; written to
and read from checkpoints.

Everything random in the loop is a function of the seed and the update's number, so no random state
has to be kept.
"""

import json
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import load_file, save_file

from training.distributed import sharding
from training.process.checkpoint import restoring
from training.process.stage import Stage
from training.rl.roles import Roles


@dataclass
class PpoState:
    update: int
    """Updates done."""
    episodes: int
    kl_coef: float
    ended: bool = False
    """Whether the method's max_kl was passed."""


def save_state(stage: Stage, roles: Roles, state: PpoState) -> None:
    """Checkpoint weights, optimizer and state after `state.update`, whole however they are divided:
    all processes ask, the first one writes.
    """
    weights, moments = (
        sharding.gather_state_dict(roles.trainable()),
        sharding.gather_optimizer_state(roles.optimizer),
    )
    if stage.rank != 0:
        return
    with stage.checkpoints.saving(state.update) as folder:
        save_file(weights, folder / "trainable.safetensors")
        torch.save(moments, folder / "optimizer.pt")
        (folder / "loss_scale.json").write_text(
            json.dumps(roles.scaler.state_dict()), encoding="utf-8"
        )
        (folder / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")


def load_state(stage: Stage, roles: Roles) -> PpoState:
    """The newest checkpoint's state, its weights and optimizer put into `roles`; a fresh state if
    there is none.

    Raises CheckpointError if it is of another version.
    """
    found = stage.checkpoints.latest()
    if found is None:
        return PpoState(update=0, episodes=0, kl_coef=getattr(stage.params, stage.name).kl.coef)
    with restoring(found.path):
        saved = load_file(found.path / "trainable.safetensors")
        for name, parameter in roles.trainable().items():
            sharding.copy_into(parameter, saved[name])
        sharding.load_optimizer_state(
            roles.optimizer,
            torch.load(found.path / "optimizer.pt", map_location="cpu", weights_only=True),
        )
        roles.scaler.load_state_dict(
            json.loads((found.path / "loss_scale.json").read_text(encoding="utf-8"))
        )
        state = PpoState(**json.loads((found.path / "state.json").read_text(encoding="utf-8")))
    stage.resumed(state.update)
    return state
