"""What a loop carries from update to update, besides the weights; written to and read from
checkpoints.

Everything random in the loop is a function of the seed and the update's number, so no random state
has to be kept.
"""

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from training.distributed import shards
from training.process.checkpoint import Checkpoint, restoring
from training.process.stage import Stage
from training.rl.learner import Learner


@dataclass
class LoopState:
    update: int
    """Updates done."""
    episodes: int


S = TypeVar("S", bound=LoopState)


@dataclass
class PpoState(LoopState):
    kl_coef: float
    ended: bool = False
    """Whether the method's max_kl was passed."""
    rolled_back: int = 0
    """How often training went back to a checkpoint because it had diverged."""

    @property
    def rate_factor(self) -> float:
        """What the learning rates are multiplied by: half for each time it went back."""
        return 0.5**self.rolled_back


def save_state(stage: Stage, learner: Learner, state: LoopState) -> None:
    """Checkpoint weights, optimizer and state after `state.update`: all processes ask, and each
    writes its share.
    """
    with stage.checkpoints.saving(state.update) as folder:
        shards.save_tensors(folder / shards.WEIGHTS, learner.trainable())
        shards.save_optimizer(folder / shards.OPTIMIZER, learner.optimizer, learner.trainable())
        if stage.rank == 0:
            (folder / "loss_scale.json").write_text(
                json.dumps(learner.scaler.state_dict()), encoding="utf-8"
            )
            (folder / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")


def load_state(stage: Stage, learner: Learner, fresh: S) -> S:
    """The newest checkpoint's state, its weights and optimizer put into `learner`; `fresh` if there
    is none.

    Raises CheckpointError if it is of another version.
    """
    found = stage.checkpoints.latest()
    if found is None:
        return fresh
    state = _restore(found, learner, type(fresh))
    stage.resumed(state.update)
    return state


def roll_back(stage: Stage, learner: Learner) -> PpoState:
    """Put the newest checkpoint's weights, optimizer and state into `learner`, and write it again
    with the learning rates halved, for the attempt that goes on from it.
    """
    found = stage.checkpoints.latest()
    assert found is not None, "a stage that may have to go back has saved where it began"
    state = _restore(found, learner, PpoState)
    state.rolled_back += 1
    save_state(stage, learner, state)
    return state


def _restore(found: Checkpoint, learner: Learner, kind: type[S]) -> S:
    with restoring(found.path):
        shards.load_tensors(found.path / shards.WEIGHTS, learner.trainable())
        shards.load_optimizer(found.path / shards.OPTIMIZER, learner.optimizer, learner.trainable())
        learner.scaler.load_state_dict(
            json.loads((found.path / "loss_scale.json").read_text(encoding="utf-8"))
        )
        return kind(**json.loads((found.path / "state.json").read_text(encoding="utf-8")))
