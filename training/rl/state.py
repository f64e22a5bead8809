"""State of a loop besides the weights, saved in checkpoints.

All randomness in the loop is a function of the seed and the update's number, so no generator state is saved.
"""

import json
from dataclasses import asdict, dataclass, field
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
    """Whether training ends early: the method's max_kl was passed, or more does not pay."""
    rolled_back: int = 0
    """Number of times training went back to a checkpoint after diverging."""
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """Score, its squared standard error, and seconds of each update."""
    resting: list[tuple[int, int]] = field(default_factory=list)
    """Prompts that were solved every time, each with the last update of its rest."""

    @property
    def rate_factor(self) -> float:
        """Factor of the learning rates: halved each time training went back."""
        return 0.5**self.rolled_back


def save_state(stage: Stage, learner: Learner, state: LoopState) -> None:
    """Checkpoint weights, optimizer and state after `state.update`: collective; each process writes its share."""
    with stage.checkpoints.saving(state.update) as folder:
        shards.save_tensors(folder / shards.WEIGHTS, learner.trainable())
        shards.save_optimizer(folder / shards.OPTIMIZER, learner.optimizer, learner.trainable())
        if stage.rank == 0:
            (folder / "loss_scale.json").write_text(json.dumps(learner.scaler.state_dict()), encoding="utf-8")
            (folder / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")


def load_state(stage: Stage, learner: Learner, fresh: S) -> S:
    """The newest checkpoint's state, with weights and optimizer loaded into `learner`; `fresh` if there is none.

    Raises CheckpointError if it is of another version.
    """
    checkpoint = stage.checkpoints.latest()
    if checkpoint is None:
        return fresh
    state = _restore(checkpoint, learner, type(fresh))
    stage.resumed(state.update)
    return state


def roll_back(stage: Stage, learner: Learner) -> PpoState:
    """Load the newest checkpoint into `learner`, and save it again with halved learning rates for the next attempt."""
    checkpoint = stage.checkpoints.latest()
    assert checkpoint is not None, "a stage that may have to go back has saved where it began"
    state = _restore(checkpoint, learner, PpoState)
    state.rolled_back += 1
    save_state(stage, learner, state)
    return state


def _restore(checkpoint: Checkpoint, learner: Learner, kind: type[S]) -> S:
    with restoring(checkpoint.path):
        shards.load_tensors(checkpoint.path / shards.WEIGHTS, learner.trainable())
        shards.load_optimizer(checkpoint.path / shards.OPTIMIZER, learner.optimizer, learner.trainable())
        learner.scaler.load_state_dict(json.loads((checkpoint.path / "loss_scale.json").read_text(encoding="utf-8")))
        return kind(**json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8")))
