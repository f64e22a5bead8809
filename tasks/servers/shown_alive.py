"""Sets a live run back to Running if the server took it for a zombie: after an outage, or when a
laptop wakes up, heartbeats are late.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.states import Running

from tasks.servers.zombies import ZOMBIE

logger = logging.getLogger(__name__)

EVERY_SECONDS = 10.0


@contextmanager
def shown_alive(flow_runs: Sequence[str | None]) -> Iterator[None]:
    """While the block runs, put those of `flow_runs` back to Running that the server ended for
    their silence.
    """
    ids, ended = [UUID(run) for run in flow_runs if run], threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_SECONDS):
            for run in ids:
                _correct(run)

    context = copy_context()  # the server's address is in it
    thread = threading.Thread(target=lambda: context.run(watch), name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()  # a server that does not answer must not block


def _correct(run: UUID) -> None:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state is not None and state.type == StateType.CRASHED and state.name == ZOMBIE:
                client.set_flow_run_state(
                    run, Running(message="It was taken for a zombie, and is alive."), force=True
                )
                logger.warning(
                    "the server had ended this run for its silence (an outage, or the machine "
                    "slept): it is running, and says so"
                )
    except Exception as error:  # noqa: BLE001 -- whatever is wrong with the server, the run goes on
        logger.debug("whether the server takes this run for dead cannot be asked: %s", error)
