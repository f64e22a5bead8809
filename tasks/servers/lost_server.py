"""Prefect's server at the end of a run from the command line: lost or not, it cannot change the outcome of the run."""

import logging
import urllib.error
import urllib.request
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed

from config.errors import RlhfError
from config.workspace.rows import pipeline_rows
from tasks.run.stop import OVER_BUDGET, STOPPED

ANSWER_SECONDS = 5.0


def is_gone() -> bool:
    """Whether the server of this process does not answer; a temporary one, which has no address, is our own."""
    api = PREFECT_API_URL.value()
    if api is None:
        return False
    try:
        with urllib.request.urlopen(f"{api.rstrip('/')}/health", timeout=ANSWER_SECONDS):
            return False
    except urllib.error.HTTPError:
        return False
    except OSError:
        return True


def hang_up() -> None:
    """Close the connection of the flow run: its last state is then refused at once, not repeated for minutes."""
    context = FlowRunContext.get()
    if context is not None and isinstance(context.client, SyncPrefectClient):
        context.client._client.close()
    logging.raiseExceptions = False  # Prefect else prints each batch of records that it cannot send


def recorded_state(root: Path, since: float) -> State | None:
    """The end that a run begun after `since` recorded here, None if it recorded none. Raises RlhfError if it
    failed.
    """
    rows = pipeline_rows(root)
    end = next((row for row in reversed(rows) if row.event == "end" and row.time >= since), None)
    if end is None:
        return None
    message = str(end.detail.get("message", ""))
    if end.state == "completed":
        return Completed()
    if end.state in ("stopped", "over_budget"):
        name = OVER_BUDGET if end.state == "over_budget" else STOPPED
        return Cancelled(name=name, message=message)
    raise RlhfError(f"the run failed: {message}")
