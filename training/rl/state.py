"""What a run of PPO, RLOO or GRPO carries from update to update, besides the weights; written to
and read from checkpoints.

Everything random in the loop is a function of the seed and the update's number, so no random state
has to be kept.
"""

import json
from dataclasses import asdict, dataclass

from training.distributed import shards
from training.process.checkpoint import Checkpoint, restoring
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
    rolled_back: int = 0
    """How often training went back to a checkpoint because it had diverged."""

    @property
    def rate_factor(self) -> float:
        """What the learning rates are multiplied by: half for each time it went back."""
        return 0.5**self.rolled_back


def save_state(stage: Stage, roles: Roles, state: PpoState) -> None:
    """Checkpoint weights, optimizer and state after `state.update`: all processes ask, and each
    writes its share.
    """
    with stage.checkpoints.saving(state.update) as folder:
        shards.save_tensors(folder / shards.WEIGHTS, roles.trainable())
        shards.save_optimizer(folder / shards.OPTIMIZER, roles.optimizer, roles.trainable())
        if stage.rank == 0:
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
        return PpoState(update=0, episodes=0, kl_coef=stage.params.section(stage.name).kl.coef)
    state = _restore(found, roles)
    stage.resumed(state.update)
    return state


def roll_back(stage: Stage, roles: Roles) -> PpoState:
    """Put the newest checkpoint's weights, optimizer and state into `roles`, and write it again
    with the learning rates halved, for the attempt that goes on from it.
    """
    found = stage.checkpoints.latest()
    assert found is not None, "a stage that may have to go back has saved where it began"
    state = _restore(found, roles)
    state.rolled_back += 1
    save_state(stage, roles, state)
    return state


def _restore(found: Checkpoint, roles: Roles) -> PpoState:
    with restoring(found.path):
        shards.load_tensors(found.path / shards.WEIGHTS, roles.trainable())
        shards.load_optimizer(found.path / shards.OPTIMIZER, roles.optimizer, roles.trainable())
        roles.scaler.load_state_dict(
            json.loads((found.path / "loss_scale.json").read_text(encoding="utf-8"))
        )
        return PpoState(**json.loads((found.path / "state.json").read_text(encoding="utf-8")))
