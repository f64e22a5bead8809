"""Keys of this project's own servers: files that their user alone can read, and the login of its MLflow server.

.rlhf/servers.json   process id, start time and port of each server that `rlhf up` started
.rlhf/mlflow.key     the password of its MLflow server, where that asks for one
.rlhf/serve.key      the key of rlhf serve
"""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from config.alive import is_alive
from config.errors import EnvironmentFault

SERVERS = Path(".rlhf") / "servers.json"
MLFLOW_KEY = Path(".rlhf") / "mlflow.key"
MLFLOW_USER = "rlhf"
SERVE_KEY = Path(".rlhf") / "serve.key"
LOCAL_NAMES = ("127.0.0.1", "localhost")
"""Host names of this machine's own servers."""


def key(path: Path) -> str:
    """The key in a file, created if needed; its folder must exist.

    Raises EnvironmentFault if other users could read it, or it cannot be written.
    """
    try:
        if not path.exists():
            _write_key(path)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise EnvironmentFault(
                f"{path} has mode {mode:o}: other users of this machine can read it. "
                "Stop the servers with rlhf down and remove the file; rlhf up makes a new key."
            )
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be used ({error.strerror}). Make it readable for this user, or remove it."
        ) from None


def _write_key(path: Path) -> None:
    """Create a key unless another process has created one; no reader sees a partial key."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(24))
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def mlflow_password(root: Path, uri: str) -> str | None:
    """The password of the server at `uri` if it is this project's own and running; None for any other.

    Raises EnvironmentFault if other users could read the file.
    """
    if not (root / MLFLOW_KEY).exists() or not _is_own(root, uri):
        return None
    return key(root / MLFLOW_KEY)


def _is_own(root: Path, uri: str) -> bool:
    """Whether the process that `rlhf up` started on this port still runs: another user's may have taken the port
    since.
    """
    address = urlsplit(uri)
    if address.scheme != "http" or address.hostname not in LOCAL_NAMES:
        return False
    try:
        entries = json.loads((root / SERVERS).read_text(encoding="utf-8"))
        return any(
            entry["name"] == "mlflow" and entry["port"] == address.port and is_alive(entry["pid"], entry["created"])
            for entry in entries
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
