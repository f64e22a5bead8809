"""Validation while a Trainer trains: at each checkpoint the loss on rows that training does not read, and with `keep:
best` the weights at its lowest.

checkpoints/<stage>/<fingerprint>/validation.json   losses at the best and at the last checkpoint
checkpoints/<stage>/<fingerprint>/best/             the trained weights at the best one

A run that is killed between two checkpoints repeats its steps, and so its losses and choices.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from training.distributed import collectives, nodes, sharding, shards
from training.distributed.model_files import replacing_on_rank0
from training.evaluation.overfitting import RowLosses, is_worse
from training.modeling.models import autocast
from training.process.artifacts import write_json
from training.process.stage import Stage

Losses = Callable[[PreTrainedModel, str], RowLosses]
"""(model, split) -> the losses of the rows of that split. Every process gets all of them."""
SPLITS = ("validation", "test")
"""Test losses are only shown: they choose nothing."""


class Checked(NamedTuple):
    """The validation losses at a step."""

    step: int
    losses: RowLosses


class Validation:
    """The validation of one stage."""

    def __init__(self, stage: Stage, keep: str, every_steps: int, losses: Losses) -> None:
        self._stage = stage
        self._keeps_best = keep == "best"
        self._every_steps = every_steps
        self._losses = losses
        self._state = stage.checkpoints.folder / "validation.json"
        self._weights = stage.checkpoints.folder / "best"
        self.best, self.last = collectives.broadcast_from_rank0(lambda: _read(self._state))

    def check(self, model: PreTrainedModel, step: int, max_steps: int) -> None:
        """Log the losses after `step`, if it is one to check, and keep the weights if they are the best so far.
        Collective.
        """
        if step % self._every_steps and step != max_steps:
            return
        was_training = model.training
        with (
            self._stage.meter.phase("evaluate", step),
            torch.no_grad(),
            sharding.unsharded(model.eval()),
            autocast(self._stage.params.model, model.device),
        ):
            losses = {split: self._losses(model, split) for split in SPLITS}
        model.train(was_training)
        self._stage.log(step, {f"{split}_loss": losses[split].mean for split in SPLITS})
        self.last = Checked(step, losses["validation"])
        if self.best is None or self.last.losses.mean < self.best.losses.mean:
            self.best = self.last
            if self._keeps_best:
                self._save(model)
        if self._stage.rank == 0:
            write_json(self._state, {"best": _content(self.best), "last": _content(self.last)})

    def finish(self, model: PreTrainedModel) -> dict[str, Any]:
        """Put the best weights into the model, if they are to be kept; returns the metrics."""
        assert self.best is not None
        assert self.last is not None
        if self._keeps_best and self.best.step != self.last.step:
            nodes.bring_files(self._weights, shards.WEIGHTS)
            shards.load_tensors(self._weights / shards.WEIGHTS, sharding.learning_parameters(model))
        later = self.last.step > self.best.step and is_worse(self.last.losses, self.best.losses)
        return {
            "kept_step": self.best.step if self._keeps_best else self.last.step,
            "validation_loss": (self.best if self._keeps_best else self.last).losses.mean,
            "overfits_from": self.best.step if later else None,
        }

    def _save(self, model: PreTrainedModel) -> None:
        with replacing_on_rank0(self._weights) as folder:
            if self._stage.rank in (0, *nodes.leaders()):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            collectives.barrier()
            shards.save_tensors(folder / shards.WEIGHTS, sharding.learning_parameters(model))
            collectives.barrier()
            nodes.gather_files(folder)


def has_validation(stage: Stage, dataset: str) -> bool:
    """Whether the prepared data has validation rows."""
    return (stage.root / f"data/prepared/{dataset}/validation.arrow").exists()


def _content(checked: Checked) -> dict[str, Any]:
    sums, weights = checked.losses
    return {"step": checked.step, "sums": sums.tolist(), "weights": weights.tolist()}


def _read(state: Path) -> tuple[Checked | None, Checked | None]:
    """The losses at the best and at the last checkpoint; None before the first."""
    if not state.exists():
        return None, None
    content = json.loads(state.read_text(encoding="utf-8"))
    best, last = (
        Checked(int(part["step"]), RowLosses(np.array(part["sums"]), np.array(part["weights"])))
        for part in (content["best"], content["last"])
    )
    return best, last
