"""What runs around a pipeline: servers, nodes of a cluster, a store; each can go away and come back."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.fault_injection.project import POOL, Project
from benchmarks.projects.checkouts import ROOT, point_remote
from benchmarks.projects.ray_nodes import Cluster
from config.load import load
from config.ports import HOST, free_port
from config.sections.run import Tracking
from tasks.servers.plans import mlflow_plan, prefect_plan
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
        self._cluster: Cluster | None = None

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
        """A store, and a Ray cluster with one node for stages; `stage` is placed there."""
        self.start_store()
        self._cluster = Cluster(self.project.cluster, self.environment)
        self.environment |= self._cluster.variables
        self.start_node()
        self.arguments += ["--set", f"where.{stage}.pool={POOL}"]

    def start_node(self) -> None:
        assert self._cluster is not None
        self._cluster.add(POOL)

    def kill_raylet(self) -> None:
        assert self._cluster is not None
        self._cluster.kill_raylet(self._cluster.nodes[-1])

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
        if self._cluster is not None:
            self._cluster.stop()
        for process in (self._gate, self._store):
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
