"""A work pool of tests: its containers are processes of this machine, and the store is a folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
from prefect.states import Completed, Crashed, Pending, Running

from config import jsonl
from config.records import AttemptRow
from tasks.run.run import Run
from tests.conftest import ROOT

CONTAINER = (
    "import sys; from tasks.remote.worker import work; from tasks.run.stop import on_signals\n"
    "with on_signals() as stop: work(sys.argv[1], stop)"
)
LONG = ("sft.epochs=200.0", "sft.max_steps=1200", "sft.checkpoint_every_steps=20")


class Pool:
    """Stands for Prefect and a worker: each request becomes a process with the environment of a container."""

    def __init__(self, folder: Path) -> None:
        self.containers: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        self.is_full = False
        """No machine is free: what is handed over stays Pending."""
        self.withdrawn: list[object] = []

    def submit(self, pool: str, request: str, name: str) -> SimpleNamespace:
        if self.is_full:
            return SimpleNamespace(id=uuid4())
        node = self._folder / f"node-{uuid4().hex}"  # it sees what others made through the store alone
        (node / "home").mkdir(parents=True)
        variables = {
            "HOME": str(node / "home"),
            "DVC_SITE_CACHE_DIR": str(node / "dvc-site"),
            "RLHF_WORKSPACES": str(node / "workspaces"),
            "RLHF_CACHE": str(node / "cache"),
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        }
        with (self._folder / "container.log").open("ab") as log:
            self.containers.append(
                subprocess.Popen(
                    [sys.executable, "-c", CONTAINER, request],
                    env=os.environ | variables,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return SimpleNamespace(id=uuid4())

    def withdraw(self, flow_run: object) -> None:
        self.withdrawn.append(flow_run)

    def state_of(self, flow_run: object) -> object:
        if self.is_full:
            return Pending()
        match self.containers[-1].poll():
            case None:
                return Running()
            case 0:
                return Completed()
            case code:
                return Crashed(message=f"exit code {code}")

    def strike(self, number: int) -> None:
        """A signal to the newest container: SIGKILL to all of it, SIGTERM to its first process, as engines do."""
        container = self.containers[-1]
        if number == signal.SIGTERM:
            container.send_signal(number)
            return
        for process in [*psutil.Process(container.pid).children(recursive=True), psutil.Process(container.pid)]:
            process.kill()


def attempts(run: Run, stage: str) -> list[AttemptRow]:
    return jsonl.read(run.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


def when_checkpoint_arrives(folder: Path, action: Callable[[], None]) -> threading.Thread:
    """Do something once a complete checkpoint is in the store."""
    store = folder / "store" / "checkpoints"
    return once(lambda: bool(list(store.glob("sft/*/*/step-*/manifest.json"))), action)


def when_resumed(run: Run, stage: str, action: Callable[[], None]) -> threading.Thread:
    """Do something once the pipeline has seen an attempt go on from a checkpoint."""
    return once(lambda: any(row.event == "resume" for row in attempts(run, stage)), action)


def once(is_so: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 600
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
