"""The gate before a run, on the Prefect side: plan, refuse above the budget, wait for approval."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import Flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State
from prefect.flow_runs import pause_flow_run
from prefect.runtime import deployment
from prefect.runtime import flow_run as this_run

from config.errors import CostError, ParamsError
from config.load import validate
from config.schema import Params
from config.workspace.at_work import APPROVAL_PATIENCE_SECONDS
from reporting.numbers import usd
from tasks.planning.budget_gate import gate, needs_approval
from tasks.planning.plan_text import markdown
from tasks.planning.prepared import Planned, Prepared, Unplannable, planned_before, prepare
from tasks.run.purse import PURPOSE
from tasks.run.recipe import differs_from_recipe
from tasks.ui.events import run_event

logger = logging.getLogger(__name__)

APPROVAL_POLL_SECONDS = 5


def checked(params: Params | Mapping[str, Any]) -> Params:
    """The params of a form or a call of the API, validated with the messages of the command line. Raises
    ParamsError.
    """
    return params if isinstance(params, Params) else validate(dict(params), "the form")


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(params: Params) -> Planned | Unplannable:
    """Plan the run, unless whoever started it has, and show the plan in the Prefect UI. Raises CostError if it is
    planned above its budget.
    """
    root = Path.cwd()
    if differs := differs_from_recipe(root, params, None):
        logger.info("%s", differs)
    prepared = planned_before() or prepare(root, params)
    create_markdown_artifact(markdown(prepared), key="plan", description="What the run will cost from here on")
    warning = gate(root, prepared)
    if warning:
        logger.warning("%s", warning)
    return prepared


def approval(prepared: Prepared) -> None:
    """Pause a run that a server started, above `budget.approval_usd`, until it is resumed.

    `rlhf run` has asked by itself, and so has the retrain cycle that a run belongs to.
    """
    in_cycle = this_run.parent_flow_run_id is not None and PURPOSE in (this_run.tags or [])
    if deployment.id is None or in_cycle or not needs_approval(prepared):
        return
    logger.warning(
        "%s are planned, above budget.approval_usd=%s: see the artifact plan, then resume the run.",
        usd(prepared.ahead_total.usd),
        prepared.params.budget.approval_usd,
    )
    pause_flow_run(timeout=APPROVAL_PATIENCE_SECONDS, poll_interval=APPROVAL_POLL_SECONDS)


def refused(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of a flow that failed: the event of a run that did not get as far as having an id of its own; the others
    have sent theirs.
    """
    error = state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)
    if isinstance(error, ParamsError | CostError):
        run_event("failed", flow_run.name, str(error))
