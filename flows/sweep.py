"""The flow `sweep`: how the cost of a stage grows, as planned and as measured."""

from typing import Literal

from prefect import flow

from config.schema import Params
from tasks.planning.gate import checked
from tasks.ui.scaling import growth, measured


@flow(name="sweep", persist_result=False, validate_parameters=False)
def sweep(
    params: Params,
    axis: Literal["model", "sequence", "batch", "data", "steps"] = "model",
    stage: Literal["sft", "reward", "ppo", "dpo", "rloo", "grpo", "evaluate"] = "sft",
    hardware: str | None = None,
    gpus: int = 1,
) -> None:
    """How time, money and memory of a stage grow along an axis, beside what the runs of this
    checkout measured.

    Args:
        params: The run to start from.
        axis: What grows: the model, the length of sequences, the batch, the data or the steps.
        stage: The stage whose cost is planned.
        hardware: Device of the plan, such as a100-80; null is this machine's CPU.
        gpus: Number of devices, 1 or more.
    """
    growth(checked(params), axis, stage, hardware, gpus)
    measured(stage)
