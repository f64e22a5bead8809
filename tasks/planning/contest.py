"""What a retrain cycle's contest will cost, beside the plan of its run: `retrain.monthly_usd` and
`budget.approval_usd` count it, the run's own `budget` does not.
"""

from dataclasses import replace

from config.errors import CostError
from costs.ledger.budget import Cost
from costs.planning.contest import CONTEST, plan_contest
from costs.planning.plans import Plan
from tasks.planning.plan import Prepared


def with_contest(prepared: Prepared) -> Prepared:
    """The run with the contest that follows it; where that can not be planned, `fault` says why
    and there is no plan of either.

    Raises CostError instead where there is an approval threshold.
    """
    if prepared.plan is None or prepared.aim is None:
        return prepared
    try:
        contest = plan_contest(prepared.params, prepared.aim)
    except CostError as error:
        if prepared.params.budget.approval_usd is not None:
            raise
        return replace(prepared, plan=None, fault=str(error), ahead={})
    plan = Plan((*prepared.plan.stages, contest), prepared.plan.assumptions)
    cost = Cost(contest.usd.expected, contest.seconds)
    return replace(prepared, plan=plan, ahead={**prepared.ahead, CONTEST: cost})
