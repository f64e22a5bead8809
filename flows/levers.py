"""The flow `levers`: what each cost lever saves at the same quality."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from config.errors import RlhfError, StageStopped
from config.schema import Params
from tasks.levers.flow_tasks import show_levers
from tasks.planning.gate import checked


@flow(name="levers", persist_result=False, validate_parameters=False)
def levers(params: Params, seeds: int = 1, only: list[str] | None = None) -> State[Any]:
    """Train the same alignment with one lever changed at a time; the result is a table, a page, and
    a run in MLflow with a child per variant.

    Args:
        params: The run to vary.
        seeds: Seeds that each variant is trained with.
        only: Names of the variants to compare with the baseline. Empty is all.
    """
    try:
        line = show_levers(checked(params), seeds, only or [])
    except StageStopped as stopped:
        return Cancelled(name="Stopped", message=str(stopped))
    except RlhfError as error:
        return Failed(message=str(error))
    return Completed(name="Compared", message=line)
