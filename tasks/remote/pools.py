"""Work pools from the pipeline's side: existence, workers, and submitting a stage."""

from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from config.errors import EnvironmentFault

FLOW = "stage"
ENTRYPOINT = "flows.stage.stage"
"""A module, not a file: the image has the code on its path."""
PARAMETERS = {
    "type": "object",
    "title": "Parameters",
    "properties": {
        "request": {
            "type": "string",
            "title": "request",
            "description": "Address of the request, below the DVC remote.",
        }
    },
    "required": ["request"],
}


def require_served(pool: str, placed: str) -> None:
    """Raise EnvironmentFault unless work pool `pool` is running, and a worker serves it; `placed` is the key that
    names it.
    """
    with get_client(sync_client=True) as client:
        try:
            work_pool = client.read_work_pool(pool)
        except ObjectNotFound:
            raise EnvironmentFault(
                f"{placed}={pool}: Prefect has no work pool of that name. Make it: prefect "
                f"work-pool create {pool} --type docker "
                f"--base-job-template docker/pools/docker.json, or set {placed}: local."
            ) from None
        if work_pool.is_paused:
            raise EnvironmentFault(
                f"{placed}={pool}: the work pool is paused. Resume it: prefect work-pool resume {pool}."
            )
        if work_pool.type == "process":
            raise EnvironmentFault(
                f"{placed}={pool}: this work pool starts processes, stages are placed on pools of "
                "containers (docker, kubernetes). "
                f"Name another, or set {placed}: local."
            )
        _require_image(work_pool, placed)
        workers = client.read_workers_for_work_pool(pool)
        if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
            raise EnvironmentFault(
                f"{placed}={pool}: no worker serves this work pool, a stage would wait forever. "
                f"Start one: prefect worker start --pool {pool}."
            )


def _require_image(pool: Any, placed: str) -> None:
    """A worker that starts before its pool is made makes the pool itself, with containers that have Prefect and
    nothing of this project.
    """
    image = pool.base_job_template.get("variables", {}).get("properties", {}).get("image")
    if image is not None and not image.get("default"):
        raise EnvironmentFault(
            f"{placed}={pool.name}: this work pool names no image, so its containers would not "
            "have the pipeline's code. Give it one: "
            f"prefect work-pool update {pool.name} --base-job-template "
            f"docker/pools/{pool.type}.json."
        )


def submit(pool: str, request: str, name: str) -> FlowRun:
    """Create the flow run of a request on a pool, a child of the current run; the pool's worker starts its
    container.
    """
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name(FLOW)
        deployment: UUID = client.create_deployment(
            flow_id,
            name=pool,
            work_pool_name=pool,
            entrypoint=ENTRYPOINT,
            path=".",
            parameter_openapi_schema=PARAMETERS,
            description="A stage in a container of its own; started by the pipeline.",
        )
    flow_run: Any = run_deployment(
        deployment, parameters={"request": request}, flow_run_name=name, timeout=0, as_subflow=True
    )
    assert isinstance(flow_run, FlowRun)
    return flow_run


def withdraw(flow_run: UUID) -> None:
    """Cancel a flow run that was handed over; its worker removes what it has begun to start."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelling(message="The pipeline was asked to stop before this began."))


def state_of(flow_run: UUID) -> Any:
    """The newest state of a flow run."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run).state
