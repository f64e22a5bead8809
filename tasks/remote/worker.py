"""The container's side of a remote stage, from the request to the reply.

The container has the code and nothing else. It makes a workspace, fetches the stage's inputs and checkpoint from the
store, does the stage as `tasks.stage.runner` does it anywhere, sends its rows while it works, and pushes its outputs.
The new dvc.lock goes back with the reply.
"""

import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from config.errors import EnvironmentFault
from config.inputs import reward_files
from config.load import dump as dump_params
from config.load import load
from config.names import inner_name
from config.records import CHANGED_CODE_VARIABLE
from config.workspace.at_work import locked
from tasks.cluster.node import LOWEST_FREE_BYTES, ROWS
from tasks.cluster.work import CHECKPOINTS_EVERY_SECONDS, Reply, every, reply_of
from tasks.dvc.pull import inputs_of
from tasks.dvc.transfers import fetch, send_outputs
from tasks.remote import heartbeat
from tasks.remote.checkpoints import CheckpointStore
from tasks.remote.heartbeat import heartbeats
from tasks.run.changed_code import policy
from tasks.run.code_version import code_digest
from tasks.run.exchange import REPLY, REQUEST, Exchange, Sender, dump, files_of, put_files
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.run.transient import persist
from tasks.run.workspace import cache, lay_out, workspaces
from tasks.stage.outcome import Outcome
from tasks.stage.runner import run_stage

logger = logging.getLogger(__name__)

STOP = "stop"
ROWS_EVERY_SECONDS = 1.0
ALIVE = Path("/tmp/rlhf-alive")
"""Touched while a stage runs, for the health check of the image."""


def work(url: str, stop: StopRequest) -> Reply:
    """Do what the request at `url` asks for, and put the reply beside it; of a store that cannot be used only the
    flow's state can tell.

    What the stage leaves is cleared away after its reply is in the store, so that none that is done can be lost.
    """
    try:
        exchange = Exchange(url)
        content = exchange.read(REQUEST)
        if content is None:
            raise EnvironmentFault(
                f"{url}/{REQUEST} does not exist: the pipeline and this container do not see the same store."
            )
        with ExitStack() as afterwards:
            reply = _answer(json.loads(content), exchange, stop, afterwards)
            persist(lambda: exchange.write(REPLY, dump(reply._asdict())), lambda: stop.force)
    except EnvironmentFault as fault:
        return Reply("bad_input", str(fault))
    return reply


def _answer(request: dict[str, Any], exchange: Exchange, stop: StopRequest, afterwards: ExitStack) -> Reply:
    def do() -> Reply:
        _same_code(request)
        return _check(request) if request["stage"] is None else _stage(request, exchange, stop, afterwards)

    pool = request["pool"]
    return reply_of(
        do, stop, lambda full: f"the volume of {full.filename or workspaces()} in work pool {pool} is full."
    )


def _same_code(request: dict[str, Any]) -> None:
    digest = code_digest()
    if request["code"] != digest:
        raise EnvironmentFault(
            f"the image of work pool {request['pool']} has the code {digest}, the pipeline has "
            f"{request['code']}. "
            "Build both images from one commit (make images), and name the new one in the pool."
        )


def _check(request: dict[str, Any]) -> Reply:
    """Whether this container could run a stage: a GPU if one is asked for, the volumes that params name, and disk
    space.
    """
    if request["gpus"] and not _gpus():
        raise EnvironmentFault(
            f"work pool {request['pool']} has {request['device']} in prices.device_by_pool, and no "
            "GPU is in its container. Give the pool device "
            "requests and its machine the container toolkit, or name another device."
        )
    for key, path in request["volumes"].items():
        if not Path(path).exists():
            raise EnvironmentFault(
                f"{key}={path} is not in the container of work pool {request['pool']}. Mount its "
                "volume there under the same path, or set the "
                "where.<stage>.pool of the stages that read it to local."
            )
    free = min(_free_bytes(folder, request["pool"]) for folder in (workspaces(), cache()))
    return Reply("ready", f"{_gpus()} GPUs, {free / 2**30:.0f} GiB free")


def _free_bytes(folder: Path, pool: str) -> int:
    """Bytes free on the volume at `folder`. Raises EnvironmentFault if they are too few, or none may be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be written in the container of work pool {pool} ({error.strerror}). "
            "Mount a volume there that the image's user "
            f"(id {os.geteuid()}) may write."
        ) from None
    if free < LOWEST_FREE_BYTES:
        raise EnvironmentFault(
            f"{free / 2**30:.1f} GiB are free at {folder} in work pool {pool}, "
            f"{LOWEST_FREE_BYTES / 2**30:.0f} are needed at least. "
            "Free some space on the volume that is mounted there."
        )
    return free


def _gpus() -> int:
    """GPUs of this container, by the driver's own tool: torch takes seconds to import, and this half does without."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _stage(request: dict[str, Any], exchange: Exchange, stop: StopRequest, afterwards: ExitStack) -> Reply:
    stage = inner_name(request["stage"], "stage of a request")
    os.environ[CHANGED_CODE_VARIABLE] = request["changed_code"]

    def on_silence() -> None:
        logger.warning(
            "nothing was heard of the pipeline for %g s: it is taken for gone, and %s stops",
            request["silence_seconds"],
            stage,
        )
        stop.requests = max(stop.requests, 1)

    afterwards.enter_context(heartbeats(exchange, request["sign_seconds"], request["silence_seconds"], on_silence))
    root = afterwards.enter_context(_workspace(request))
    run = Run(root, request["run_id"], load(root / "params.yaml"))
    store = Exchange(request["remote"]["url"])
    persist(lambda: fetch(root, inputs_of(root, stage)), lambda: stop.requested)
    mirror = CheckpointStore(root, stage, store, run.run_id)
    persist(mirror.restore, lambda: stop.requested)
    with _transfers(root, stage, exchange, mirror, stop):
        outcome = run_stage(run, stage, stop, lambda progress: None)
    return _done(run, stage, outcome, exchange, mirror, stop, afterwards)


def _done(
    run: Run,
    stage: str,
    outcome: Outcome,
    exchange: Exchange,
    mirror: CheckpointStore,
    stop: StopRequest,
    afterwards: ExitStack,
) -> Reply:
    """The outputs to the remote, however long that takes; then the checkpoints have done their work."""

    def give_up() -> bool:
        return stop.requested or _stop_requests(exchange) > 0

    try:
        persist(lambda: send_outputs(run.root, stage), give_up)
    except EnvironmentFault as error:
        raise type(error)(
            f"{stage} is done, but its outputs could not be sent: {error} It resumes from its last checkpoint."
        ) from None
    afterwards.callback(_clear, mirror)
    return Reply(
        "done",
        attempt=outcome.attempt,
        cached=outcome.cached,
        lock=(run.root / "dvc.lock").read_text(encoding="utf-8"),
    )


def _clear(mirror: CheckpointStore) -> None:
    try:
        mirror.remove()
    except EnvironmentFault as error:
        logger.warning("checkpoints of a stage that is done stay in the store: %s", error)


def _stop_requests(exchange: Exchange) -> int:
    """Number of stop requests from the pipeline, as far as the store is reachable."""
    try:
        return int(exchange.read(STOP) or 0)
    except EnvironmentFault:
        return 0


@contextmanager
def _workspace(request: dict[str, Any]) -> Iterator[Path]:
    """A folder with the code, the files of the request and the store as DVC remote; gone afterwards."""
    root = workspaces() / inner_name(request["id"], "id of a request")
    shutil.rmtree(root, ignore_errors=True)
    lay_out(root, request["remote"])
    put_files(root, request["files"])
    try:
        with locked(root):  # rlhf clean skips workspaces in use
            yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


# ---------------------------------------------------------------- rows and checkpoints on their way


@contextmanager
def _transfers(
    root: Path, stage: str, exchange: Exchange, mirror: CheckpointStore, stop: StopRequest
) -> Iterator[None]:
    """Send rows and checkpoints, and hear whether the pipeline asks to stop, while the block runs; the last rows go at
    its end.
    """
    sender = Sender(root / "runs" / stage, exchange, ROWS)
    ended, sending = threading.Event(), threading.Lock()

    def send_rows() -> None:
        with sending:
            sender.send()

    def rows() -> None:
        send_rows()
        requests = int(exchange.read(STOP) or 0)
        stop.requests = max(stop.requests, requests)
        ALIVE.touch()

    threads = [
        threading.Thread(target=every, args=(seconds, ended, task), daemon=True)
        for seconds, task in ((ROWS_EVERY_SECONDS, rows), (CHECKPOINTS_EVERY_SECONDS, lambda: mirror.send(send_rows)))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for send in (sender.send, mirror.send):
            try:
                persist(send, lambda: stop.force)
            except EnvironmentFault as error:  # it must not take the place of how the stage ended
                logger.warning("%s", error)


def request_of(
    run: Run,
    stage: str | None,
    pool: str,
    identity: str,
    remote: dict[str, str],
    volumes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What the pipeline asks a container of `pool` for; stage None only checks it, and whether `volumes` (key -> path)
    are there.
    """
    device = run.params.prices.device_by_pool.get(pool)
    files = [
        "dvc.lock",
        "data/inputs/data.json",
        "data/inputs/model.json",
        "data/inputs/reward.json",
        "data/inputs/student.json",
        "data/inputs/judge.json",
        f"runs/{stage}/attempts.jsonl",
        *reward_files(run.root, run.params),
    ]
    return {
        "id": identity,
        "run_id": run.run_id,
        "stage": stage,
        "changed_code": policy(),
        "pool": pool,
        "code": code_digest(),
        "remote": remote,
        "device": device,
        "volumes": volumes or {},
        "sign_seconds": heartbeat.EVERY_SECONDS,
        "silence_seconds": heartbeat.SILENCE_SECONDS,
        "gpus": device is not None and device != "cpu",
        "files": files_of(run.root, files) | {"params.yaml": dump_params(run.params)} if stage else {},
    }
