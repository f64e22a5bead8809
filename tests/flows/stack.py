"""The whole local stack in a project of quick stages: both servers and the worker as `rlhf up` starts them, on ports
of their own.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from config.ports import HOST, free_port
from config.records import stages_of
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import Server, servers
from tests.conftest import ROOT
from tests.support.stage_project import make_project

PATIENCE_SECONDS = 240.0
"""For what takes seconds on an idle machine."""


class Stack(NamedTuple):
    root: Path
    client: SyncPrefectClient
    ports: tuple[str, ...]

    def rlhf(self, *arguments: str) -> str:
        """What the command printed; it has to succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments],
            cwd=self.root,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self, *arguments: str) -> str:
        return self.rlhf("up", *self.ports, *arguments)

    def server(self, name: str) -> Server:
        return next(server for server in servers(self.root) if server.name == name)

    def behave_from_now(self, how: str) -> None:
        """What every stage does from now on, see tests/stage_project.py."""
        (self.root / "behaviour.txt").write_text(how)

    def behave(self, how: str) -> None:
        """The same, and every stage is done again."""
        self.behave_from_now(how)
        for path in self.root.glob("*.out"):
            path.write_text(f"changed by hand {time.time()}")

    def start(self, deployment: str = "rlhf/rlhf", **changes: Any) -> UUID:
        """A run as the form starts it: the prefilled parameters with some of them changed, `section__key` for those of
        params.
        """
        answer = self.client.read_deployment_by_name(deployment)
        parameters = dict(answer.parameters)
        for name, value in changes.items():
            if name in parameters:
                parameters[name] = value
            else:
                node: dict[str, Any] = parameters["params"]
                *sections, key = name.split("__")
                for section in sections:
                    node = node[section]
                node[key] = value
        return self.client.create_flow_run_from_deployment(answer.id, parameters=parameters).id

    def run(self, flow_run_id: UUID) -> FlowRun:
        return self.client.read_flow_run(flow_run_id)

    def await_end(self, flow_run_id: UUID) -> FlowRun:
        return self.await_run(flow_run_id, lambda run: run.state is not None and run.state.is_final())

    def await_state(self, flow_run_id: UUID, *names: str) -> FlowRun:
        return self.await_run(flow_run_id, lambda run: run.state is not None and run.state.name in names)

    def await_run(self, flow_run_id: UUID, reached: Callable[[FlowRun], bool]) -> FlowRun:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached(run := self.run(flow_run_id)):
            assert time.monotonic() < deadline, (run.state, self.worker_log()[-3000:])
            assert run.state is None or not run.state.is_final(), (run.state, self.worker_log()[-3000:])
            time.sleep(0.2)
        return run

    def artifacts(self, flow_run_id: UUID) -> dict[str, str]:
        """Key -> what the artifacts of a run show."""
        run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {str(artifact.key): str(artifact.data) for artifact in self.client.read_artifacts(artifact_filter=run)}

    def worker_log(self) -> str:
        path = self.root / ".rlhf" / "logs" / "worker.log"
        return path.read_text() if path.exists() else ""


@contextmanager
def stack(folder: Path, *options: str) -> Iterator[Stack]:
    """A running stack in a new project below `folder`, and none of its processes afterwards."""
    root = make_project(folder / "project", folder / "remote", stages_of("ppo"))
    shutil.copyfile(ROOT / "prefect.yaml", root / "prefect.yaml")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    prefect, mlflow = free_port(), free_port()
    ports = ("--prefect-port", str(prefect), "--mlflow-port", str(mlflow))
    ours = {PREFECT_API_URL: f"http://{HOST}:{prefect}/api", PREFECT_API_AUTH_STRING: api_key(root)}
    with temporary_settings(ours), get_client(sync_client=True) as client:
        result = Stack(root, client, ports)
        try:
            result.up(*options)
            yield result
        finally:
            result.rlhf("down")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
