"""The flow `promote`: make the model of these params the champion without a contest."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from config.schema import Params
from flows.rlhf import rlhf
from tasks.planning.gate import checked
from tasks.retraining.by_hand import promote_by_hand


@flow(name="promote", persist_result=False, validate_parameters=False)
def promote(params: Params, why: str = "named by hand") -> State[Any]:
    """Do what is not done yet of a run, then make its model the champion, without a contest.

    Args:
        params: Params of the run whose model is meant; nothing is trained if they match.
        why: The reason, for the record of champions.
    """
    resolved = checked(params)
    state = rlhf(resolved, return_state=True)
    if not state.is_completed():
        return state
    return Completed(name="Promoted", message=promote_by_hand(resolved, str(state.state_details.flow_run_id), why))
