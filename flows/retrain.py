"""The flow `retrain`: train again when the data has grown; the new model becomes champion if it beats the old one."""

from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import State

from config.schema import Params
from flows.rlhf import rlhf
from tasks.planning.gate import checked
from tasks.planning.prepared import known_plan
from tasks.retraining.cycle import (
    alone,
    due,
    put_in_place,
    retraining,
    trained,
    users_decide,
    wait_for_approval,
    winner,
)
from tasks.run.purse import PURPOSE


@flow(name="retrain", persist_result=False, validate_parameters=False)
def retrain(params: Params, force: bool = False) -> State[Any]:
    """Look for new data and votes, decide, run the pipeline, compare with the champion, promote only on evidence.

    Args:
        params: The run; its section retrain says when to train, what that may cost, and what
            a new champion must show.
        force: Train without a reason in the data; neither the month's budget nor the gate is
            lifted.
    """
    with retraining(checked(params)) as cycle, alone(cycle) as busy:
        if not users_decide(cycle, busy, force) and (reason := due(cycle, busy, force)) is not None:
            wait_for_approval(reason)
            with tags(PURPOSE), known_plan(reason.prepared):
                state = rlhf(cycle.params, return_state=True)
            run_id = trained(cycle, state)
            won = run_id and winner(cycle, reason.champion, run_id)
            if won:
                put_in_place(cycle, reason.champion, won)
    return cycle.state
