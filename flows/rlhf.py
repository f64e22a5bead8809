"""The flow `rlhf`: from nothing to an aligned, evaluated, tracked model."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from config.schema import Params
from tasks.pipeline import data, evaluate, pipeline_run, ppo, report, reward, sft


@flow(name="rlhf", persist_result=False)
def rlhf(params: Params) -> State[Any]:
    """Data, demonstrations, preferences, PPO, evaluation, report. Only what changed since the last run is done again."""
    with pipeline_run(params) as run:
        data(run)
        sft(run)
        reward(run)
        ppo(run)
        evaluate(run)
        report(run)
    return run.state
