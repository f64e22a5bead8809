"""The Prefect and MLflow servers of a project, and its worker, as background processes: start, find again, stop.

.rlhf/servers.json     process id, start time and port of each that `rlhf up` started
.rlhf/logs/<name>.log  what it prints
"""

import atexit
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from config.alive import created, is_alive
from config.errors import EnvironmentFault
from config.ports import HOST, free_port, is_port_free
from config.workspace.login import SERVERS
from tasks.run.run import STATE_FOLDER
from tasks.servers.flow_runs import end_runs
from tasks.servers.plans import WORKER, Plan, prefect_plan

START_TIMEOUT_SECONDS = 300.0
"""10 s on an idle machine; the first start creates the databases, and a busy machine takes minutes."""
STOP_TIMEOUT_SECONDS = 20.0
WITHOUT_PAGES = {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}


class Server(NamedTuple):
    """A server or worker started here."""

    name: str
    pid: int
    created: float
    """When the process was created, as config/alive.py counts: process ids are used again."""
    port: int

    @property
    def url(self) -> str:
        """Its pages; the worker has none, and tells its health there."""
        return f"http://{HOST}:{self.port}"

    @property
    def health_url(self) -> str:
        return f"{self.url}/{'api/health' if self.name == 'prefect' else 'health'}"

    def is_alive(self) -> bool:
        return is_alive(self.pid, self.created)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.health_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def start(root: Path, plans: Sequence[Plan]) -> list[Server]:
    """Start what is not running yet and wait until all of it answers.

    Raises EnvironmentFault if a port is in use or a server does not come up; what
    was started then is stopped.
    """
    running = {server.name: server for server in servers(root)}
    missing = [plan for plan in plans if plan.name not in running]
    for plan in missing:
        _require_free(plan)
    for plan in missing:
        running[plan.name] = _launch(root, plan)
        _remember(root, list(running.values()))
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    for server in running.values():
        _await_health(root, server, deadline, [plan.name for plan in missing])
    return list(running.values())


def servers(root: Path) -> list[Server]:
    """The servers started here whose processes are alive."""
    try:
        entries = json.loads(_state(root).read_text(encoding="utf-8"))
        return [server for server in (Server(**entry) for entry in entries) if server.is_alive()]
    except (OSError, ValueError, TypeError):
        return []


def stop(root: Path) -> list[Server]:
    """Stop the worker and all servers started here, politely and then not; returns those that were running.

    A running run is asked to stop first, and given the time for its checkpoint.
    """
    # its runs end while their server still listens
    running = sorted(servers(root), key=lambda server: server.name != WORKER)
    end_runs(root)
    for server in running:
        _end(server)
    _state(root).unlink(missing_ok=True)
    return running


def prefect_api(root: Path) -> str | None:
    """API of the running Prefect server of this project, None if there is none that answers."""
    prefect = next((server for server in servers(root) if server.name == "prefect"), None)
    return f"{prefect.url}/api" if prefect and prefect.is_healthy() else None


def start_temporary(root: Path) -> str:
    """A Prefect server for this process, without pages; returns its API. It ends with this process, however that ends.

    Raises EnvironmentFault if it does not come up.
    """
    port = free_port()
    plan = prefect_plan(root, port)
    path = log_path(root, "temporary")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        process = subprocess.Popen(
            [*plan.command, "--temporary"],
            cwd=root,
            env={**os.environ, **plan.environment, **WITHOUT_PAGES},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the run, which still has to report its end
        )
    # before Prefect is imported, so after what it sends at its end
    atexit.register(_end_temporary, process)
    server = Server(plan.name, process.pid, created(process.pid), port)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not server.is_healthy():
        dead = process.poll() is not None
        if dead or time.monotonic() > deadline:
            raise EnvironmentFault(
                "the temporary Prefect server "
                f"{'ended' if dead else f'did not answer within {START_TIMEOUT_SECONDS:.0f} s'}. Why is in {path}."
            )
        time.sleep(0.1)
    return f"{server.url}/api"


def _end_temporary(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_path(root: Path, name: str) -> Path:
    return root / STATE_FOLDER / "logs" / f"{name}.log"


def _state(root: Path) -> Path:
    return root / SERVERS


def _remember(root: Path, running: Sequence[Server]) -> None:
    _state(root).write_text(json.dumps([server._asdict() for server in running], indent=1), encoding="utf-8")


def _require_free(plan: Plan) -> None:
    if not is_port_free(plan.port):
        raise EnvironmentFault(
            f"port {plan.port} on {HOST} is in use by another program, {plan.name} needs a free one. "
            f"Choose another with rlhf up {plan.port_option}, or stop that program."
        )


def _launch(root: Path, plan: Plan) -> Server:
    path = log_path(root, plan.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log, warnings.catch_warnings():
        # the process outlives this object, and us, on purpose
        warnings.simplefilter("ignore", ResourceWarning)
        process = subprocess.Popen(
            plan.command,
            cwd=root,
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # as long as the object is there, a process that ends at once keeps its id
        server = Server(plan.name, process.pid, created(process.pid), plan.port)
        del process
    return server


def _await_health(root: Path, server: Server, deadline: float, started: Sequence[str]) -> None:
    while not server.is_healthy():
        dead = not server.is_alive()
        if dead or time.monotonic() > deadline:
            for other in servers(root):
                if other.name in started:
                    _end(other)
            fault = "ended" if dead else f"did not answer within {START_TIMEOUT_SECONDS:.0f} s"
            kind = server.name if server.name == WORKER else f"{server.name} server"
            raise EnvironmentFault(f"the {kind} {fault}. Why is in {log_path(root, server.name)}.")
        time.sleep(0.2)


def _end(server: Server) -> None:
    """The server and whatever it started, which is all in its process group."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        group = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        os.killpg(server.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(group, timeout=STOP_TIMEOUT_SECONDS)
        if alive:
            os.killpg(server.pid, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=STOP_TIMEOUT_SECONDS)
