"""The flow `study`: runs that differ in a few settings, and one table."""

from contextlib import chdir
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from config.errors import OverBudget
from config.workspace.study import read_study
from flows.rlhf import rlhf
from tasks.planning.prepared import known_plan
from tasks.run.run import STUDY
from tasks.run.stop import OVER_BUDGET, STOPPED, on_signals
from tasks.study.publish import publish
from tasks.study.runs import in_project, opened


@flow(name="study", persist_result=False, validate_parameters=False)
def study(file: str) -> State[Any]:
    """Run every variant of a study with every seed, and compare cost and quality with the first variant's. What two
    variants share is made once; what has completed is not run again.

    Args:
        file: The study, relative to the project, such as studies/levers.yaml.
    """
    root, path = Path.cwd(), Path(file)
    with opened(root, path, read_study(in_project(root, path))) as running, on_signals() as stop:
        try:
            for run, prepared in running.ahead():
                if stop.requested:
                    return Cancelled(name=STOPPED, message="asked to stop: the same command goes on there.")
                named = rlhf.with_options(flow_run_name=f"{run.name}, seed {run.seed}")
                with chdir(running.place), tags(f"{STUDY}{running.name}"), known_plan(prepared):
                    state = named(run.params, return_state=True)
                if state.is_cancelled():
                    return Cancelled(name=state.name, message=state.message)
                if not state.is_completed():
                    running.failed(run, str(state.result(raise_on_failure=False)))
        except OverBudget as over:
            return Cancelled(name=OVER_BUDGET, message=str(over))
        return Completed(name="Compared", message=publish(root, running))
