"""Stages that train on a fixed set of rows: supervised fine-tuning, reward model, and the settings they share with
DPO and KTO.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Fraction, FunctionPath, Positive, Rate, Section, splits
from config.sections.levers import LORA, OPTIMIZER, Lora, OptimizerName


class Optimisation(Section):
    """Settings that sft, reward, dpo and kto share."""

    lora: Lora | None = Field(description=LORA)
    optimizer: OptimizerName = Field(description=OPTIMIZER)
    epochs: Annotated[float, Field(gt=0)] = Field(description="Passes over the training data.")
    max_steps: Positive | None = Field(
        description="Stop after this many optimizer steps, if the epochs have not ended before; "
        "null trains all epochs."
    )
    batch_size: Positive = Field(
        description="Sequences (sft), pairs (reward, dpo) or replies (kto) per optimizer step, over all processes."
    )
    micro_batch_size: Positive = Field(
        description="Sequences or pairs per forward pass of a process, at most; the rest is gradient accumulation."
    )
    learning_rate: Rate = Field(description="Peak learning rate of AdamW.")
    warmup_fraction: Fraction = Field(description="Share of the steps over which the learning rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(description="Learning rate after the warm-up.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(description="AdamW weight decay.")
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="AdamW decay of the squared gradient's mean; runs of a few hundred steps learn "
        "faster with 0.98 than with the usual 0.999."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(description="Gradient norm is clipped to this.")
    activation_checkpointing: bool = Field(
        description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    checkpoint_every_steps: Positive = Field(
        description="Steps between checkpoints, and between looks at the validation rows."
    )
    keep: Literal["last", "best"] = Field(
        description="Which weights become the stage's model: the last, or those of the checkpoint "
        "with the lowest loss on the rows of data.validation_fraction."
    )
    log_every_steps: Positive = Field(description="Steps between metric rows.")

    def optimizer_steps(self, rows: int) -> int:
        """Optimizer steps on `rows` training rows: all epochs, including a short last batch of each, limited by
        max_steps.
        """
        steps = math.ceil(math.ceil(rows / self.batch_size) * self.epochs)
        return steps if self.max_steps is None else min(steps, self.max_steps)


class Sft(Optimisation):
    """Supervised fine-tuning on the demonstrations, loss on the completion only."""

    max_length: Positive = Field(
        description="Prompt plus completion, in tokens; longer rows are truncated at the end."
    )

    @model_validator(mode="after")
    def _batches(self) -> "Sft":
        splits("sft", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        return self


class Reward(Optimisation):
    """Reward model: Bradley-Terry on the preference pairs."""

    kind: Literal["model"]
    init: Literal["sft", "base"] = Field(description="Weights the reward model starts from.")
    layers: Positive | None = Field(
        description="Layers of the starting model that it keeps, evenly spaced, the first and the "
        "last included; null keeps all. A value model that starts from it is as small."
    )
    max_length: Positive = Field(description="Prompt plus reply, in tokens; longer pairs are dropped and counted.")
    normalise: bool = Field(
        description="Store mean and standard deviation of the training scores and apply them "
        "wherever the model scores."
    )

    @model_validator(mode="after")
    def _batches(self) -> "Reward":
        splits("reward", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        return self

    @model_validator(mode="after")
    def _whole_base(self) -> "Reward":
        if self.layers is not None and self.lora is not None:
            raise ParamsError(
                f"reward.layers={self.layers} makes a model of its own, and reward.lora adapts the "
                "one that it starts from. Set either to null in params.yaml."
            )
        return self


class RewardFunction(Section):
    """A function of your own in place of a reward model, for tasks whose answers can be checked: docs/data.md."""

    kind: Literal["function"]
    path: FunctionPath = Field(
        description="File and function, as in rewards/exact_match.py:score. It is called with "
        "prompt, response and row (the other columns of the prompt's row), and returns a number."
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        description="Longest time for one response; a function that takes longer ends the stage."
    )

    @property
    def script(self) -> str:
        """The file of the function."""
        return self.path.rpartition(":")[0]


RewardSection = Annotated[Reward | RewardFunction, Field(discriminator="kind")]
