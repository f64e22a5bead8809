"""The flow `scale`: how the cost of each stage grows, measured and planned."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from config.errors import RlhfError, StageStopped
from config.schema import Params
from tasks.levers.flow_tasks import show_scale
from tasks.planning.gate import checked


@flow(name="scale", persist_result=False, validate_parameters=False)
def scale(params: Params, quick: bool = True, only: list[str] | None = None) -> State[Any]:
    """Time a few steps of every stage at several sizes of the model, the sequences, the batch, the
    responses per prompt, the data and the updates, one at a time.

    Args:
        params: The run to vary.
        quick: Fewer sizes of each factor, at most ten minutes for the demo.
        only: Names of the factors. Empty is all.
    """
    try:
        line = show_scale(checked(params), quick, only or [])
    except StageStopped as stopped:
        return Cancelled(name="Stopped", message=str(stopped))
    except RlhfError as error:
        return Failed(message=str(error))
    return Completed(name="Measured", message=line)
