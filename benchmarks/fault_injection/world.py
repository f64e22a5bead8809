"""What runs around a pipeline: servers, a worker, a store; each can go away and come back."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.fault_injection.project import POOL, Project
from benchmarks.fault_injection.worker import TYPE
from benchmarks.projects.checkouts import ROOT, point_remote
from config.load import load
from config.ports import HOST, free_port
from config.sections.run import Tracking
from tasks.servers.plans import mlflow_plan, prefect_plan
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import servers, start, stop

BUCKET = "store"
WAIT_SECONDS = 120.0


class World:
    """The servers of a project; whoever makes one has `environment` as its own, so that what it starts has it too."""

    def __init__(self, project: Project, environment: dict[str, str]) -> None:
        self.project, self.environment = project, environment
        self.ports = {"prefect": free_port(), "mlflow": free_port(), "store": free_port()}
        self.arguments: list[str] = []
        """What `rlhf run` is told of them."""
        self._store: subprocess.Popen[bytes] | None = None
        self._gate: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []

    # ------------------------------------------------------------ Prefect and MLflow

    def start_server(self, name: str) -> None:
        """As `rlhf up` does, or again after it was killed."""
        root, port = self.project.root, self.ports[name]
        tracking = Tracking.model_validate(
            load(root / "params.yaml").tracking.model_dump() | {"uri": "sqlite:///mlflow.db"}
        )
        plan = prefect_plan(root, port) if name == "prefect" else mlflow_plan(root, tracking, port)
        assert plan is not None
        with _as_environment(self.environment):
            start(root, [plan])
        if name == "mlflow":
            self.arguments = [*self.arguments, "--set", f"tracking.uri=http://{HOST}:{port}"]

    def server_pid(self, name: str) -> int:
        return next(server.pid for server in servers(self.project.root) if server.name == name)

    # ------------------------------------------------------------ a pool and its store

    def start_pool(self, stage: str) -> None:
        """A store, a Prefect server with a work pool, a worker; `stage` is placed there."""
        self.start_store()
        self.start_server("prefect")
        api = f"http://{HOST}:{self.ports['prefect']}/api"
        self._client = self.environment | {
            "PREFECT_API_URL": api,
            "PREFECT_API_AUTH_STRING": api_key(self.project.root),
            "PREFECT_HOME": str(self.project.root / ".rlhf" / "prefect"),
        }
        script = (
            "from prefect import get_client\n"
            "from prefect.client.schemas.actions import WorkPoolCreate\n"
            "from prefect.workers.process import ProcessWorker\n"
            "with get_client(sync_client=True) as client:\n"
            f"    client.create_work_pool(WorkPoolCreate(name={POOL!r}, type={TYPE!r},\n"
            "        base_job_template=ProcessWorker.get_default_base_job_template()))\n"
        )
        subprocess.run([sys.executable, "-c", script], env=self._client, check=True, capture_output=True)
        self.start_worker()
        self.arguments += ["--set", f"where.{stage}.pool={POOL}"]

    def start_worker(self) -> None:
        """With the code of the project, as the image of its containers would have it."""
        variables = {
            "RLHF_WORKSPACES": str(self.project.pool_workspaces),
            "RLHF_CACHE": str(self.project.pool_cache),
            "PYTHONPATH": f"{self.project.root}{os.pathsep}{ROOT}",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_LOGGING_LEVEL": "WARNING",
        }
        with (self.project.root / ".rlhf" / "logs" / "worker.log").open("ab") as log:
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.fault_injection.worker", POOL],
                    cwd=self.project.folder,
                    env=self._client | variables,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + WAIT_SECONDS
        look = (
            "from prefect import get_client\n"
            "with get_client(sync_client=True) as client:\n"
            f"    found = client.read_workers_for_work_pool({POOL!r})\n"
            "raise SystemExit(not any(worker.status == 'ONLINE' for worker in found))\n"
        )
        while subprocess.run(
            [sys.executable, "-c", look], env=self._client, capture_output=True, check=False
        ).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError("the worker does not come up")
            time.sleep(0.5)

    def kill_worker(self) -> None:
        self._workers[-1].kill()
        self._workers[-1].wait()

    def start_store(self) -> None:
        """A store that speaks S3, with a bucket, as the DVC remote."""
        inner = free_port()
        with (self.project.folder / "store.log").open("ab") as log:
            self._store = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(inner)],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._inner = inner
        self.open_store()
        self.environment |= {
            "AWS_ENDPOINT_URL": f"http://{HOST}:{self.ports['store']}",
            "AWS_ACCESS_KEY_ID": "faults",
            "AWS_SECRET_ACCESS_KEY": "faults",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        _await_port(inner)
        script = f"import boto3; boto3.client('s3').create_bucket(Bucket={BUCKET!r})"
        subprocess.run([sys.executable, "-c", script], env=self.environment, check=True)
        point_remote(self.project.root, f"s3://{BUCKET}/dvc")

    def open_store(self) -> None:
        """Let connections through to the store, which is behind a gate: shut, it refuses them."""
        command = ["-m", "benchmarks.fault_injection.gate", str(self.ports["store"])]
        self._gate = subprocess.Popen(
            [sys.executable, *command, str(self._inner)], cwd=ROOT, env=self.environment, start_new_session=True
        )
        _await_port(self.ports["store"])

    def shut_store(self) -> None:
        assert self._gate is not None
        self._gate.kill()
        self._gate.wait()

    # ------------------------------------------------------------ a remote that is a folder

    def hide_remote(self) -> None:
        """As a share that is not mounted."""
        self.project.remote.rename(self.project.folder / "remote.away")
        self.project.remote.write_text("not mounted")

    def show_remote(self) -> None:
        if self.project.remote.is_file():
            self.project.remote.unlink()
            (self.project.folder / "remote.away").rename(self.project.remote)

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """Stop what is there still; whoever is left is no server."""
        self.show_remote()
        with suppress(OSError, ValueError):
            stop(self.project.root)
        for process in (*self._workers, self._gate, self._store):
            if process is not None:
                process.kill()
                process.wait()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def _as_environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
