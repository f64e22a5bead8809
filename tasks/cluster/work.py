"""The stage's process on a node: `python -m tasks.cluster.work`, in the workspace that the actor has made.

On the first node it fetches the inputs and the checkpoint from the store, does the stage as `tasks.stage.runner` does
it anywhere, sends each checkpoint, and pushes the outputs; on the others it starts their share of the processes.
"""

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EnvironmentFault,
    RlhfError,
    StageStopped,
    UserError,
)
from config.load import load
from config.records import CHANGED_CODE_VARIABLE, RUN_ID_VARIABLE
from config.workspace.at_work import locked
from tasks.cluster.checkpoints import CheckpointStore
from tasks.cluster.node import OFFSETS, REPLY, REQUEST, ROWS
from tasks.dvc.pull import inputs_of
from tasks.dvc.transfers import fetch, send_outputs
from tasks.run.run import Run
from tasks.run.stop import StopRequest, on_signals
from tasks.run.store import Store
from tasks.run.transient import TransientFault, UnknownFault, persist
from tasks.stage.outcome import StageCrashed
from tasks.stage.process import last_line, run_process
from tasks.stage.runner import command, log_path, run_stage

logger = logging.getLogger(__name__)

CHECKPOINTS_EVERY_SECONDS = 2.0
PARENT = os.getppid()
"""The actor; with it the pipeline, or the node's Ray, is gone."""
LOOK_SECONDS = 1.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Reply(NamedTuple):
    """How a stage ended on a node."""

    kind: str
    """done, bad_input, stopped, crashed."""
    message: str = ""
    attempt: int | None = None
    cached: bool = False
    hopeless: bool = False
    lock: str = ""
    """The new dvc.lock, of the first node."""

    @classmethod
    def of(cls, content: bytes) -> "Reply":
        """Parse a reply; one of another version may hold more."""
        return cls(**{key: value for key, value in json.loads(content).items() if key in cls._fields})


def main() -> None:
    root = Path.cwd()
    request = json.loads((root / REQUEST).read_bytes())
    os.environ[CHANGED_CODE_VARIABLE] = request["changed_code"]
    with locked(root), on_signals() as stop, _until_orphaned(stop):
        reply = _answer(root, request, stop)
    write_atomically(root / REPLY, json.dumps(reply._asdict()))


def _answer(root: Path, request: dict[str, Any], stop: StopRequest) -> Reply:
    """How it ends: its reply, or what its exception means."""
    try:
        run = Run(root, request["run_id"], load(root / "params.yaml"))
        persist(lambda: fetch(root, inputs_of(root, request["stage"])), lambda: stop.requested)
        return (_first if request["node"] == 0 else _other)(run, request, stop)
    except StageStopped as stopped:
        return Reply("stopped", str(stopped))
    except TransientFault as fault:
        return Reply("stopped" if stop.requested else "crashed", str(fault))
    except UnknownFault as fault:
        return Reply("crashed", str(fault))
    except UserError as error:
        return Reply("bad_input", str(error))
    except StageCrashed as crash:
        return Reply("crashed", str(crash), hopeless=crash.hopeless)
    except (RlhfError, OSError, subprocess.SubprocessError) as error:
        if isinstance(error, OSError) and _says_full(error):  # otherwise the next try would find the disk full
            place = error.filename or root
            return Reply("bad_input", f"the disk of {place} on {socket.gethostname()} is full. Free some space on it.")
        return Reply("crashed", f"{type(error).__name__}: {error}")


def _says_full(error: OSError) -> bool:
    """When copying a folder, shutil collects the errors as texts."""
    return error.errno in DISK_FULL or (
        isinstance(error, shutil.Error) and any(os.strerror(code) in str(error) for code in DISK_FULL)
    )


def _first(run: Run, request: dict[str, Any], stop: StopRequest) -> Reply:
    stage = request["stage"]

    def require_taken() -> None:
        if not _are_taken(run.root, stage):
            raise StageStopped(f"{stage} is done, and its pipeline is gone")

    mirror = CheckpointStore(run.root, stage, Store(request["remote"]["url"]), run.run_id)
    persist(mirror.restore, lambda: stop.requested)
    with _sending(run.root, stage, mirror, stop):
        outcome = run_stage(run, stage, stop, lambda progress: None, request["launch"], require_taken)
    try:
        persist(lambda: send_outputs(run.root, stage), lambda: stop.requested)
    except EnvironmentFault as error:
        raise type(error)(
            f"{stage} is done, but its outputs could not be sent: {error} It resumes from its last checkpoint."
        ) from None
    lock = (run.root / "dvc.lock").read_text(encoding="utf-8")
    return Reply("done", attempt=outcome.attempt, cached=outcome.cached, lock=lock)


def _other(run: Run, request: dict[str, Any], stop: StopRequest) -> Reply:
    stage = request["stage"]
    ended = run_process(
        [*command(run.root, stage), *request["launch"]], run.root, log_path(run.root, stage), stop,
        variables={RUN_ID_VARIABLE: run.run_id, CHANGED_CODE_VARIABLE: request["changed_code"]},
    )  # fmt: skip
    kinds = {EXIT_DONE: "done", EXIT_RESUMABLE: "stopped", EXIT_BAD_INPUT: "bad_input"}
    kind = kinds.get(ended.code, "stopped" if stop.requested else "crashed")
    return Reply(kind, f"node {request['node']}: {last_line(ended.output)}")


@contextmanager
def _sending(root: Path, stage: str, mirror: CheckpointStore, stop: StopRequest) -> Iterator[None]:
    """Send checkpoints while the block runs, and the last one at its end."""
    ended = threading.Event()

    def send() -> None:
        mirror.send(lambda: _are_taken(root, stage))

    def send_often() -> None:
        warned = False
        while not ended.wait(CHECKPOINTS_EVERY_SECONDS):
            try:
                send()
                warned = False
            except EnvironmentFault as fault:  # what was not sent goes the next time
                if not warned:
                    logger.warning("%s", fault)
                warned = True

    sender = threading.Thread(target=send_often, daemon=True)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()
        try:
            persist(send, lambda: stop.force)
        except EnvironmentFault as error:  # it must not take the place of how the stage ended
            logger.warning("%s", error)


def _are_taken(root: Path, stage: str) -> bool:
    """Wait until the pipeline has the rows of now; False if it is gone. A checkpoint or an output without the rows
    before it would leave a gap in the ledger, so the next run goes on from the checkpoint before.
    """
    folder = root / "runs" / stage
    sizes = {name: path.stat().st_size for name in ROWS if name != "log.txt" and (path := folder / name).exists()}
    while os.getppid() == PARENT:
        offsets = json.loads((root / OFFSETS).read_bytes()) if (root / OFFSETS).exists() else {}
        if all(offsets.get(name, 0) >= size for name, size in sizes.items()):
            return True
        time.sleep(LOOK_SECONDS / 4)
    return False


@contextmanager
def _until_orphaned(stop: StopRequest) -> Iterator[None]:
    """Request a stop when the actor is gone."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            if os.getppid() != PARENT:
                stop.requests = max(1, stop.requests)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    main()
