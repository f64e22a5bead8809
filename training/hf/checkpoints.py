"""Where the model of a Hugging Face Trainer is, whole or divided, and what its checkpoints hold:
each process's share of what learns.

A run can therefore go on with another number of processes, and with another `sharding`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from training.distributed import sharding, shards
from training.process.stage import Stage

SCHEDULER = "scheduler.pt"
"""The Trainer's own name."""


class LearningCheckpoints:
    """Mixed into a Trainer: puts the model in place as `sharding` says. Checkpoints hold the part
    of it that learns.
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All processes come here, as all have a part of the weights."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        shards.save_tensors(folder / shards.WEIGHTS, sharding.learning_parameters(self.model))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        shards.load_tensors(
            Path(resume_from_checkpoint) / shards.WEIGHTS, sharding.learning_parameters(self.model)
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        learning = sharding.learning_parameters(self.model)
        shards.save_optimizer(
            Path(output_dir) / shards.OPTIMIZER, self.optimizer.optimizer, learning
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            learning = sharding.learning_parameters(self.model)
            shards.load_optimizer(
                Path(checkpoint) / shards.OPTIMIZER, self.optimizer.optimizer, learning
            )
            schedule = torch.load(
                Path(checkpoint) / SCHEDULER, map_location="cpu", weights_only=True
            )
            self.lr_scheduler.load_state_dict(schedule)
