"""The flow `stage`: one stage in its own container, started by the pipeline on the work pool named in `where`."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from tasks.cluster.work import Reply
from tasks.remote.worker import work
from tasks.run.stop import on_signals


@flow(name="stage", persist_result=False)
def stage(request: str) -> State[Any]:
    """Run the stage of the request at this address; the reply is written beside it."""
    with on_signals() as stop:
        return _state(work(request, stop))


def _state(reply: Reply) -> State[Any]:
    match reply.kind:
        case "done" | "ready":
            return Completed(message=reply.message or None)
        case "stopped":
            return Cancelled(name="Stopped", message=reply.message)
        case _:
            return Failed(message=reply.message)
