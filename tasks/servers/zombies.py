"""Ends runs whose process is gone while the server shows them as running: they would hold their
slot forever.

A live worker reports dead processes itself. This is for the other cases: the worker was killed too,
or the machine restarted.
"""

from contextlib import suppress

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed

ZOMBIE = "Zombie"
"""Name of the state; its type is Crashed."""
WORKER_LABEL = "prefect.worker.name"
AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
GO_ON = "Start it again: it resumes from its checkpoint."


def end_zombies(
    client: SyncPrefectClient, pool: str, worker: str, worker_is_alive: bool
) -> list[FlowRun]:
    """Fail the runs of `worker` whose process is gone, which frees their slots; returns them.

    A run that has no process yet is gone with its worker.
    """
    at_work = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=AT_WORK))
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    zombies = [
        run
        for run in at_work
        if run.labels.get(WORKER_LABEL, worker) == worker and _is_gone(run, worker_is_alive)
    ]
    for run in zombies:
        process = (
            f"its process {run.infrastructure_pid} is"
            if run.infrastructure_pid
            else "its worker ended before it had a process, which is"
        )
        client.set_flow_run_state(
            run.id,
            Crashed(name=ZOMBIE, message=f"Nobody is working at this run: {process} gone. {GO_ON}"),
            force=True,
        )
    return zombies


def _is_gone(run: FlowRun, worker_is_alive: bool) -> bool:
    """Process ids are used again: the command must fit too."""
    if not run.infrastructure_pid:
        return not worker_is_alive and run.state_type == StateType.PENDING
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
        process = psutil.Process(int(run.infrastructure_pid))
        return process.status() == psutil.STATUS_ZOMBIE or "prefect.engine" not in " ".join(
            process.cmdline()
        )
    return True
