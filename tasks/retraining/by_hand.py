"""A promotion requested from the server: without a contest, for a completed run."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from config.errors import EnvironmentFault
from config.schema import Params
from config.workspace.rows import pipeline_rows
from tasks.champions.registry import promote, update_mlflow
from tasks.stage.progress import Display
from tasks.ui.events import model_event


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote_by_hand(params: Params, pipeline_flow_run: str, why: str) -> str:
    """Make the model of the run that was Prefect's `pipeline_flow_run` the champion; returns that in a line. Raises as
    `promote` does.
    """
    root = Path.cwd()
    run_id = _run_of(root, pipeline_flow_run)
    promote(root, run_id, why, by=flow_run.name or "promote")
    message = f"{run_id} is the champion: {why}"
    model_event("promoted", run_id, message)
    if fault := update_mlflow(root, params):
        Display().say(f"warning: {fault}")
    return message


def _run_of(root: Path, pipeline_flow_run: str) -> str:
    rows = pipeline_rows(root)
    run_ids = (
        row.run_id
        for row in reversed(rows)
        if row.event == "start" and row.detail.get("prefect.flow_run_id") == pipeline_flow_run
    )
    run_id = next(run_ids, None)
    if run_id is None:
        raise EnvironmentFault(
            "runs/pipeline.jsonl does not know the run that was to be promoted. Start the promotion again."
        )
    return run_id
