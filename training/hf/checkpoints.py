"""Placement and checkpoints of a Hugging Face Trainer's model: checkpoints hold each process's shard of the trained
weights.

A run can therefore resume with another number of processes, and another `sharding`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from training.distributed import sharding, shards
from training.process.stage import Stage

SCHEDULER = "scheduler.pt"
"""The Trainer's file name."""


class TrainedCheckpoints:
    """Trainer mixin that places the model according to `sharding`. Checkpoints hold the trained weights."""

    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    stage: Stage | None = None
    is_distributed_loading_by_transformers: bool

    def place(self, stage: Stage) -> None:
        """Move the model to the stage's device. Trained parameters must be known by now."""
        self.stage = stage
        sharding.shard(self.model, stage)
        sharding.set_root_modules([self.model])
        if sharding.shards_weights(stage):
            self.is_distributed_loading_by_transformers = True  # tells the Trainer neither to move nor to wrap it

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Called by the Trainer before the sharding is known: `place` moves the model instead."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective: every process has a shard of the weights."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        shards.save_tensors(folder / shards.WEIGHTS, sharding.learning_parameters(self.model))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        shards.load_tensors(Path(resume_from_checkpoint) / shards.WEIGHTS, sharding.learning_parameters(self.model))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        learning = sharding.learning_parameters(self.model)
        shards.save_optimizer(Path(output_dir) / shards.OPTIMIZER, self.optimizer.optimizer, learning)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            learning = sharding.learning_parameters(self.model)
            shards.load_optimizer(Path(checkpoint) / shards.OPTIMIZER, self.optimizer.optimizer, learning)
            schedule = torch.load(Path(checkpoint) / SCHEDULER, map_location="cpu", weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)
