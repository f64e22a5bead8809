"""The flow `rlhf`: from data to an aligned, evaluated, tracked model."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from config.schema import Params
from tasks.pipeline.pipeline_run import pipeline_run
from tasks.pipeline.stage_tasks import align, data, distill, evaluate, places, report, reward, sft
from tasks.planning.gate import approval, checked, plan, refused


@flow(name="rlhf", persist_result=False, validate_parameters=False, on_failure=[refused])
def rlhf(params: Params) -> State[Any]:
    """Plan, data, demonstrations, preferences, alignment, optional distillation, evaluation, report. Unchanged stages
    are not run again.

    Args:
        params: The run. For another run change only what differs.
    """
    prepared = plan(checked(params))
    approval(prepared)
    with pipeline_run(prepared) as run:
        places(run)
        data(run)
        sft(run)
        reward(run)
        align(run)
        distill(run)
        evaluate(run)
        report(run)
    return run.state
