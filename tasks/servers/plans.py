"""How the servers of a project and its worker are started: command, environment, port."""

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config.ports import HOST, free_port
from config.sections.run import Tracking
from config.workspace.login import MLFLOW_KEY, MLFLOW_USER, key
from tasks.servers.prefect_server import own_origins
from tasks.servers.prefect_settings import api_key, home, own_server, settings, without_telemetry

POLL_SECONDS = 2
"""Seconds between the worker's polls for runs."""
POOL = "cpu"
"""Work pool of the flows: processes in the project's workspace."""
WORKER, SERVE = "worker", "serve"
OWN_TRACKING_URI = "sqlite:///mlflow.db"
"""Where MLflow's server keeps what runs tell it whose tracking.uri is that server."""


class Plan(NamedTuple):
    """A server to start."""

    name: str
    port: int
    port_option: str
    command: Sequence[str]
    environment: dict[str, str]


def prefect_plan(root: Path, port: int, tracking: Tracking | None = None, with_key: bool = True) -> Plan:
    """The Prefect server on the project's database; its pages need the port, or they call
    4200 and stay empty.

    It answers its own pages and whoever has the key: its API starts commands. Without key: every user of this machine,
    and no other page. Where `tracking.uri` names a PostgreSQL, Prefect's database is there too.
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
        from tasks.servers.databases import prefect_url  # its libraries take half a second to import

        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = prefect_url(tracking.uri)
    return Plan(
        "prefect",
        port,
        "--prefect-port",
        [sys.executable, "-m", "tasks.servers.prefect_server", str(port)],
        environment,
    )


def mlflow_plan(root: Path, tracking: Tracking, port: int, with_login: bool = False) -> Plan | None:
    """MLflow's pages on the database of `tracking.uri`; None if that is a server already, other than this very one.
    With a login it asks for a name and a password.
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
    # its job runners judge traces of language model applications: four processes that nothing here asks for the URI
    # may hold a password, which everybody could read in a command
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


def serve_plan(root: Path, port: int) -> Plan:
    """The champion behind OpenAI's HTTP API."""
    command = [sys.executable, "-m", "cli.main", "serve", "champion", "--port", str(port)]
    return Plan(SERVE, port, "--serve-port", command, {})


def is_postgresql(uri: str) -> bool:
    return uri.startswith(("postgresql:", "postgresql+"))


def worker_plan(root: Path, api: str) -> Plan:
    """A worker that starts the runs of POOL as processes in this checkout; its health is asked for on any free
    port.
    """
    port = free_port()
    environment = {
        **settings(root, api),
        **own_server(root, api),
        "PREFECT_HOME": str(home(root)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
        "PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS),
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
        POOL,
        "--type",
        "process",
        "--name",
        f"{POOL} on {socket.gethostname()}",
        "--install-policy",
        "never",
        "--with-healthcheck",
    ]
    return Plan(WORKER, port, "", command, environment)
