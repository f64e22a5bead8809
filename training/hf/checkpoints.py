"""Where the model of a Hugging Face Trainer is, whole or divided, and what its checkpoints hold:
the same files, however it is divided.

A run can therefore go on with another number of processes, and with another `sharding`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainingArguments

from training.distributed import sharding
from training.process.stage import Stage

LEARNING = "learning.safetensors"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
"""The Trainer's own names."""


class LearningCheckpoints:
    """Mixed into a Trainer: puts the model in place as `sharding` says. Checkpoints hold the part
    of it that learns, whole.
    """

    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    stage: Stage | None = None
    is_distributed_loading_by_transformers: bool

    def place(self, stage: Stage) -> None:
        """Put the model on the stage's device; what learns must be decided by now."""
        self.stage = stage
        sharding.shard(self.model, stage)
        sharding.set_root_modules([self.model])
        if sharding.shards_weights(stage):
            self.is_distributed_loading_by_transformers = (
                True  # the Trainer's word for: neither move nor wrap it
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The Trainer asks for it before it is known how the model is to be divided: `place` does
        it.
        """

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        assert self.stage is not None
        if self.optimizer is None:
            created = super().create_optimizer(*arguments)  # type: ignore[misc]
            self.optimizer = sharding.shard_optimizer(created, self.stage)
        made: torch.optim.Optimizer = self.optimizer
        return made

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All processes come here, as all have a part of the weights."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        weights = sharding.gather_state_dict(sharding.learning_parameters(self.model))
        if not self.args.should_save:
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / LEARNING)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        weights = load_file(Path(resume_from_checkpoint) / LEARNING)
        for name, parameter in sharding.learning_parameters(self.model).items():
            sharding.copy_into(parameter, weights[name])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = sharding.gather_optimizer_state(self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state, schedule = (
                torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)
                for name in (OPTIMIZER, SCHEDULER)
            )
            sharding.load_optimizer_state(self.optimizer.optimizer, state)
            self.lr_scheduler.load_state_dict(schedule)
