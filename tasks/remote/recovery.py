"""Recovery of stages that a killed run of this checkout left in containers: they are stopped with a checkpoint before
the stage resumes.

Two containers would else do the same stage, and rows that were not taken would be missing in the ledger.
"""

import json
import logging
import time
from pathlib import Path

from config.errors import EnvironmentFault
from config.workspace.rows import pipeline_rows
from tasks.cluster.driver import take_lock
from tasks.cluster.work import Reply
from tasks.dvc.pull import remote_of
from tasks.dvc.transfers import default_remote
from tasks.remote.heartbeat import CONTAINER, GONE_SECONDS, HeartbeatMonitor
from tasks.remote.worker import STOP
from tasks.run.exchange import REPLY, REQUEST, Exchange, Receiver
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.stage.progress import Display

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


def ask_to_stop(run: Run) -> None:
    """Ask whatever earlier runs have left running, of any stage, to stop, and do not wait: its machines may be the
    ones that are needed.

    Raises EnvironmentFault if the store cannot be reached.
    """
    for exchange, _ in _exchanges(run):
        if exchange.read(REPLY) is None:
            exchange.write(STOP, b"1")


def recover_abandoned(run: Run, stage: str, stop: StopRequest) -> str | None:
    """Stop a container of `stage` that outlived its pipeline, and take its rows.

    If the stage completed meanwhile and dvc.lock has not changed here since, takes and returns its dvc.lock; None
    otherwise. Raises EnvironmentFault if the store cannot be reached.
    """
    lock = None
    for exchange, exchanged_stage in _exchanges(run):
        if exchanged_stage == stage:
            reply = _end(run.root, stage, exchange, stop)
            usable = _usable_lock(run.root, exchange, reply)
            if usable is not None:
                take_lock(run.root, usable)
                lock = usable
            if reply is not None or not stop.requested:
                remove_exchange(exchange)  # not before the lock is here: there is no other copy of it
    return lock


def remove_exchange(exchange: Exchange) -> None:
    """Remove what two sides have exchanged. Errors are ignored: what stays there does no harm."""
    try:
        exchange.remove("")
    except EnvironmentFault as error:
        logger.warning("what was exchanged stays at %s: %s", exchange.url, error)


def _exchanges(run: Run) -> list[tuple[Exchange, str]]:
    """Exchanges that earlier runs left in the store, and the stage of each."""
    earlier = _earlier_runs(run)
    if not earlier or default_remote(run.root) is None:
        return []
    exchanges, pairs = Exchange(f"{remote_of(run.root)['url']}/exchange"), []
    for name in exchanges.names():
        run_id, _, request = name.partition("/")
        if run_id in earlier and request.endswith(f"/{REQUEST}") and not request.startswith("check-"):
            pairs.append((exchanges.below(name.removesuffix(f"/{REQUEST}")), request.partition("-")[0]))
    return pairs


def _earlier_runs(run: Run) -> set[str]:
    rows = pipeline_rows(run.root)
    return {row.run_id for row in rows if row.event == "end" and row.state in ("killed", "failed")} - {run.run_id}


def _end(root: Path, stage: str, exchange: Exchange, stop: StopRequest) -> Reply | None:
    """Its reply; None if nothing is heard of it any more, or the run is asked to stop meanwhile."""
    receiver, silence = (Receiver(root / "runs" / stage, exchange, again=True), HeartbeatMonitor(exchange, CONTAINER))
    if exchange.read(REPLY) is None:
        message = (
            f"{stage} may still be running in a container of a run that was killed: letting it "
            "checkpoint, then going on from there."
        )
        logger.warning("%s", message)
        Display().say(message)
        exchange.write(STOP, b"1")
    while (content := exchange.read(REPLY)) is None and silence.seconds() < GONE_SECONDS and not stop.requested:
        receiver.receive()
        time.sleep(POLL_SECONDS)
    receiver.receive()
    return Reply.of(content) if content is not None else None


def _usable_lock(root: Path, exchange: Exchange, reply: Reply | None) -> str | None:
    """The new lock, if the stage started from the lock that is here."""
    if reply is None or reply.kind != "done":
        return None
    started_from = json.loads(exchange.read(REQUEST) or b"{}").get("files", {}).get("dvc.lock")
    here = root / "dvc.lock"
    return reply.lock if started_from == (here.read_text(encoding="utf-8") if here.exists() else None) else None
