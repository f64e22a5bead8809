"""In how many processes a stage runs, and what these divide among themselves."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from config.errors import ParamsError
from config.sections.base import Positive, Section


class Processes(Section):
    """How many processes share a stage's work: the same batches and steps, the same result to
    rounding. Changing it retrains nothing.
    """

    sft: Positive = Field(
        description="Processes of stage sft: one per GPU, or several on a CPU. Must divide "
        "sft.batch_size."
    )
    reward: Positive = Field(
        description="Processes of stage reward. Must divide reward.batch_size."
    )
    ppo: Positive = Field(
        description="Processes of stage ppo: rollouts and mini-batches are divided by tokens."
    )
    dpo: Positive = Field(description="Processes of stage dpo. Must divide dpo.batch_size.")
    rloo: Positive = Field(
        description="Processes of stage rloo: rollouts and mini-batches are divided by tokens."
    )
    grpo: Positive = Field(
        description="Processes of stage grpo: rollouts and mini-batches are divided by tokens."
    )


def _present(value: Any) -> Any:
    if value == "zero1":
        raise PydanticCustomError(
            "gone", "is gone; write zero2, which holds less in each process, or none for fp16"
        )
    return value


Level = Annotated[Literal["none", "zero2", "zero3"], BeforeValidator(_present)]
WEIGHTS_DIVIDED = ("zero2", "zero3")


class Sharding(Section):
    """What the processes of a stage divide beside the work, to hold larger models. The same result
    to rounding; changing it retrains nothing.
    """

    sft: Level = Field(
        description="none: each process holds all. zero2: the optimizer's state and gradients are "
        "divided, and weights between two steps. zero3: also weights at work, which are gathered "
        "layer by layer (FSDP2)."
    )
    reward: Level = Field(description="As for sft.")
    ppo: Level = Field(
        description="As for sft, for all four roles. In a pass without gradient, as in sampling, "
        "the role at work is whole."
    )
    dpo: Level = Field(description="As for sft.")
    rloo: Level = Field(description="As for ppo, without a value model.")
    grpo: Level = Field(description="As for ppo, without a value model.")
    offload: bool = Field(
        description="zero2 and zero3: divided weights, gradients and optimizer state wait in the "
        "host's memory; slower. No effect on a CPU."
    )

    @model_validator(mode="after")
    def _offloads_something(self) -> "Sharding":
        if self.offload and not {
            self.sft,
            self.reward,
            self.ppo,
            self.dpo,
            self.rloo,
            self.grpo,
        } & set(WEIGHTS_DIVIDED):
            raise ParamsError(
                "sharding.offload=true moves divided weights to the host, and no stage divides "
                "them. "
                "Set a stage of sharding to zero2 or zero3, or sharding.offload: false in "
                "params.yaml."
            )
        return self
