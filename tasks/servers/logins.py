"""Whether a running server asks for a key or a password, and for this project's."""

import base64
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

from config.errors import EnvironmentFault
from config.workspace.login import MLFLOW_KEY, MLFLOW_USER, key
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import Server

REQUEST_TIMEOUT_SECONDS = 60.0


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
