"""What a retrain cycle's own processes will cost, beside the plan of its run: `retrain.monthly_usd` and
`budget.approval_usd` count them, the run's own `budget` does not.
"""

from dataclasses import fields, replace

from config.errors import CostError
from costs.ledger.budget import Cost
from costs.planning.retraining import CONTEST, EXAMINE, plan_cycle
from tasks.planning.prepared import Planned, Prepared, Unplannable


def with_cycle(prepared: Planned | Unplannable, examined: bool = False) -> Planned | Unplannable:
    """The run with the contest that follows it, and unless that has been done the examination before it; where these
    cannot be planned, `fault` says why and there is no plan of either.

    Raises CostError instead where there is an approval threshold.
    """
    if not isinstance(prepared, Planned):
        return prepared
    try:
        plan = plan_cycle(prepared.plan, prepared.params, prepared.target, examined)
    except CostError as error:
        if prepared.params.budget.approval_usd is not None:
            raise
        facts = {field.name: getattr(prepared, field.name) for field in fields(Prepared)}
        return Unplannable(**facts, fault=str(error))
    cycle_costs = {
        stage.stage: Cost(stage.usd.expected, stage.seconds)
        for stage in plan.stages
        if stage.stage in (EXAMINE, CONTEST)
    }
    costs = {**prepared.ahead, **cycle_costs}
    ahead = {stage.stage: costs[stage.stage] for stage in plan.stages if stage.stage in costs}
    return replace(prepared, plan=plan, ahead=ahead)
