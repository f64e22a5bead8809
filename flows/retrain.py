"""The flow `retrain`: train again when the data has grown; the new model becomes champion if it
beats the old one.
"""

from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import State

from config.schema import Params
from flows.rlhf import rlhf
from tasks.planning.gate import checked
from tasks.planning.prepared import known_plan
from tasks.retraining.cycle import (
    is_due,
    is_trained,
    put_in_place,
    retraining,
    wait_for_approval,
    wins,
)
from tasks.run.month import PURPOSE


@flow(name="retrain", persist_result=False, validate_parameters=False)
def retrain(params: Params, force: bool = False) -> State[Any]:
    """Look for new data and votes, decide, run the pipeline, compare with the champion, promote
    only on evidence.

    Args:
        params: The run; its section retrain says when to train, what that may cost, and what
            a new champion must show.
        force: Train without a reason in the data; neither the month's budget nor the gate is
            lifted.
    """
    with retraining(checked(params)) as cycle:
        if is_due(cycle, force):
            wait_for_approval(cycle)
            with tags(PURPOSE), known_plan(cycle.prepared):
                state = rlhf(cycle.params, return_state=True)
            if is_trained(cycle, state) and wins(cycle):
                put_in_place(cycle)
    return cycle.state
