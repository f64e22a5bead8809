"""The Prefect and MLflow servers of a project, and its worker, as background processes: start, find
again, stop.

.rlhf/servers.json     process id, start time and port of each that `rlhf up` started
.rlhf/logs/<name>.log  what it prints
"""

import atexit
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import psutil

from config.alive import created, is_alive
from config.errors import EnvironmentFault
from config.login import MLFLOW_KEY, MLFLOW_USER, SERVERS, key
from config.sections.run import Tracking
from tasks.run.run import STATE_FOLDER
from tasks.servers.prefect_server import HOST as HOST
from tasks.servers.prefect_server import own_origins
from tasks.servers.prefect_settings import api_key, home, own_server, settings, without_telemetry

START_TIMEOUT_SECONDS = 300.0
"""10 s on an idle machine; the first start creates the databases, and a busy machine takes
minutes.
"""
STOP_TIMEOUT_SECONDS = 20.0
REQUEST_TIMEOUT_SECONDS = 60.0
RUN_PATIENCE_SECONDS = 600.0
"""For a run that the worker has at work: its stage finishes the step and writes a checkpoint."""
POLL_SECONDS = 2
"""Between two questions of the worker whether there is a run to start."""
HEARTBEAT_SECONDS = 30
"""Between two signs of life of a run, which the automation on zombies waits for; Prefect takes no
less.
"""
WORKER = "worker"
WITHOUT_PAGES = {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}
OWN_TRACKING_URI = "sqlite:///mlflow.db"
"""Where MLflow's server keeps what runs tell it whose tracking.uri is that server."""


class Server(NamedTuple):
    """A server, or the worker, that was started here."""

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


class Plan(NamedTuple):
    """A server to start."""

    name: str
    port: int
    port_option: str
    command: Sequence[str]
    environment: dict[str, str]


def prefect_plan(
    root: Path, port: int, tracking: Tracking | None = None, with_key: bool = True
) -> Plan:
    """The Prefect server on the project's database; its pages need the port, or they call
    4200 and stay empty.

    It answers its own pages and whoever has the key: its API starts commands. Without key: every
    user of this machine, and no other page. Where `tracking.uri` names a PostgreSQL, Prefect's
    database is there too.
    """
    api = f"http://{HOST}:{port}/api"
    environment = {
        "PREFECT_HOME": str(home(root)),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_UI_API_URL": api,
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(own_origins(port)),
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        **without_telemetry(),
    }
    if with_key:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = api_key(root)
    if tracking is not None and is_postgresql(tracking.uri):
        from tasks.servers.databases import (
            prefect_url,  # its libraries take half a second to import
        )

        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = prefect_url(tracking.uri)
    return Plan(
        "prefect",
        port,
        "--prefect-port",
        [sys.executable, "-m", "tasks.servers.prefect_server", str(port)],
        environment,
    )


def mlflow_plan(root: Path, tracking: Tracking, port: int, with_login: bool = False) -> Plan | None:
    """MLflow's pages on the database of `tracking.uri`; None if that is a server already, other
    than this very one. With a login it asks for a name and a password.
    """
    uri = (
        OWN_TRACKING_URI
        if tracking.uri.rstrip("/") in (f"http://{name}:{port}" for name in (HOST, "localhost"))
        else tracking.uri
    )
    if uri.startswith(("http://", "https://", "databricks")):
        return None
    command = [
        sys.executable, "-m", "mlflow", "server", "--artifacts-destination",
        str(root.resolve() / "mlartifacts"), "--host", HOST, "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    if with_login:
        command = [sys.executable, "-m", "tracking.mlflow_server", str(port)]
    # its job runners judge traces of language model applications: four processes that nothing here
    # asks for the URI may hold a password, which everybody could read in a command
    environment = {
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **without_telemetry(),
    }
    if with_login:
        home(root)  # makes the folder
        environment |= {
            "MLFLOW_ARTIFACTS_DESTINATION": str(root.resolve() / "mlartifacts"),
            "MLFLOW_TRACKING_USERNAME": MLFLOW_USER,
            "MLFLOW_TRACKING_PASSWORD": key(root / MLFLOW_KEY),
        }
    return Plan("mlflow", port, "--mlflow-port", command, environment)


def is_postgresql(uri: str) -> bool:
    return uri.startswith(("postgresql:", "postgresql+"))


def worker_name(pool: str) -> str:
    """What Prefect calls the worker of this machine."""
    return f"{pool} on {socket.gethostname()}"


def worker_plan(root: Path, api: str, pool: str) -> Plan:
    """A worker that starts the runs of a work pool as processes in this checkout; its health is
    asked for on any free port.
    """
    port = free_port()
    environment = {
        **settings(root, api),
        **own_server(root, api),
        "PREFECT_HOME": str(home(root)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
        "PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_WORKER_WEBSERVER_HOST": HOST,
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
        "--name",
        worker_name(pool),
        "--install-policy",
        "never",
        "--with-healthcheck",
    ]
    return Plan(WORKER, port, "", command, environment)


def start(root: Path, plans: Sequence[Plan]) -> list[Server]:
    """Start what is not running yet and wait until all of it answers.

    Raises EnvironmentFault if a port is taken by somebody else or a server does not come up; what
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
    """Stop the worker and all servers started here, politely and then not; returns those that were
    running.

    A run at work is asked to stop first, and given the time for its checkpoint.
    """
    # its runs end while their server still listens
    running = sorted(servers(root), key=lambda server: server.name != WORKER)
    _let_runs_end(root)
    for server in running:
        _end(server)
    _state(root).unlink(missing_ok=True)
    return running


def prefect_api(root: Path) -> str | None:
    """API of the running Prefect server of this project, None if there is none that answers."""
    found = next((server for server in servers(root) if server.name == "prefect"), None)
    return f"{found.url}/api" if found and found.is_healthy() else None


def start_temporary(root: Path) -> str:
    """A Prefect server for this process, without pages; returns its API. It ends with this process,
    however that ends.

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
                f"{'ended' if dead else f'did not answer within {START_TIMEOUT_SECONDS:.0f} s'}. "
                f"Why is in {path}."
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


def asks_for_key(root: Path, server: Server) -> bool:
    """Whether a running Prefect server wants the key; one that was started with --no-auth does not.

    Raises EnvironmentFault if it wants another one than this project's.
    """
    if _status(server, None) != HTTPStatus.UNAUTHORIZED:
        return False
    if _status(server, api_key(root)) == HTTPStatus.UNAUTHORIZED:
        raise EnvironmentFault(
            f"the Prefect server on {server.url} was started with another key. Stop it with rlhf "
            "down, then rlhf up again."
        )
    return True


def asks_for_login(root: Path, server: Server) -> bool:
    """Whether a running MLflow server wants its name and password.

    Raises EnvironmentFault if it wants others than this project's.
    """
    path = "/version"
    if _status(server, None, path) != HTTPStatus.UNAUTHORIZED:
        return False
    login = f"{MLFLOW_USER}:{key(root / MLFLOW_KEY)}"
    if _status(server, login, path) == HTTPStatus.UNAUTHORIZED:
        raise EnvironmentFault(
            f"the MLflow server on {server.url} was started with another password. Stop it with "
            "rlhf down, then rlhf up again."
        )
    return True


def _status(server: Server, login: str | None, path: str = "/api/admin/version") -> int:
    """How the server answers a question that needs the key, or name and password."""
    request = urllib.request.Request(f"{server.url}{path}")
    if login is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def log_path(root: Path, name: str) -> Path:
    return root / STATE_FOLDER / "logs" / f"{name}.log"


def _state(root: Path) -> Path:
    return root / SERVERS


def _remember(root: Path, running: Sequence[Server]) -> None:
    _state(root).write_text(
        json.dumps([server._asdict() for server in running], indent=1), encoding="utf-8"
    )


def is_port_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _require_free(plan: Plan) -> None:
    if not is_port_free(plan.port):
        raise EnvironmentFault(
            f"port {plan.port} on {HOST} is in use by another program, {plan.name} needs a free "
            "one. "
            f"Choose another with rlhf up {plan.port_option}, or stop that program."
        )


def _launch(root: Path, plan: Plan) -> Server:
    path = log_path(root, plan.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log, warnings.catch_warnings():
        # the process outlives this object, and us, on purpose
        warnings.simplefilter("ignore", ResourceWarning)
        pid = subprocess.Popen(
            plan.command,
            cwd=root,
            env={**os.environ, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ).pid
    return Server(plan.name, pid, created(pid), plan.port)


def _await_health(root: Path, server: Server, deadline: float, started: Sequence[str]) -> None:
    while not server.is_healthy():
        dead = not server.is_alive()
        if dead or time.monotonic() > deadline:
            for other in servers(root):
                if other.name in started:
                    _end(other)
            what = "ended" if dead else f"did not answer within {START_TIMEOUT_SECONDS:.0f} s"
            kind = server.name if server.name == WORKER else f"{server.name} server"
            raise EnvironmentFault(f"the {kind} {what}. Why is in {log_path(root, server.name)}.")
        time.sleep(0.2)


def runs_at_work(root: Path) -> list[psutil.Process]:
    """The processes of runs in this checkout: of a worker, which they may have outlived, or of a
    terminal.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if is_run(process.cmdline()) and Path(process.cwd()) == root.resolve():
                found.append(process)
    return found


def is_run(command: Sequence[str]) -> bool:
    """Whether a command line is that of a flow run: a worker's, or `rlhf run` and `rlhf
    retrain`.
    """
    if "prefect.engine" in command:
        return True
    program = next(
        (
            i
            for i, word in enumerate(command[:4])
            if word == "cli.main" or Path(word).name == "rlhf"
        ),
        None,
    )
    return program is not None and any(
        word in ("run", "retrain") for word in command[program + 1 : program + 2]
    )


def _let_runs_end(root: Path) -> None:
    """Ask each run once: a second request, which the worker passes on as it ends, would make it end
    without a checkpoint.
    """
    runs = runs_at_work(root)
    for run in runs:
        with suppress(psutil.NoSuchProcess):
            run.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + RUN_PATIENCE_SECONDS
    while any(map(_is_at_work, runs)) and time.monotonic() < deadline:
        time.sleep(0.2)


def _is_at_work(process: psutil.Process) -> bool:
    """Not one that has ended and whose parent does not ask for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(server: Server) -> None:
    """The server and whatever it started, which is all in its process group."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        group = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        os.killpg(server.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(group, timeout=STOP_TIMEOUT_SECONDS)
        if alive:
            os.killpg(server.pid, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=STOP_TIMEOUT_SECONDS)
