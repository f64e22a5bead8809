"""Settings of the Prefect that this project uses: its own state below .rlhf/, quiet, on the server of `rlhf up` if
there is one.

They are environment variables because Prefect reads them when it is imported; set them before importing `flows`. So is
the key of the server: other users can read the commands of a process, not its environment.

.rlhf/prefect.key    what the server asks for, readable by its user alone; whoever has it may run
                     any command as that user
"""

import os
from pathlib import Path

from config.errors import EnvironmentFault
from config.workspace.login import key
from tasks.run.run import STATE_FOLDER

HEARTBEAT_SECONDS = 30
"""Interval of the heartbeats by which the server knows that a flow run is alive; the least that Prefect accepts."""


def home(root: Path) -> Path:
    """PREFECT_HOME, made if need be: results and the database, shared by the temporary server and the one of `rlhf
    up`.

    Raises EnvironmentFault if it cannot be written.
    """
    folder = (root / STATE_FOLDER / "prefect").resolve()
    try:
        # the database knows the addresses of webhooks
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)  # Prefect does not make the folders above it
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be made ({error.strerror}). Make {root} writable for this user."
        ) from None
    return folder


def api_key(root: Path) -> str:
    """The key of this project's Prefect server, made if need be.

    Raises EnvironmentFault if other users could read it, or it cannot be written.
    """
    return key(home(root).parent / "prefect.key")


def own_server(root: Path, api_url: str) -> dict[str, str]:
    """Variables that let a process talk to a server of this project."""
    return {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": api_key(root)}


def settings(root: Path, api_url: str | None) -> dict[str, str]:
    """Environment of a process that runs flows, on our server at `api_url` if there is one. What the user has set
    stays.

    A server that the user has named is never sent our key.
    """
    wanted = {
        "PREFECT_HOME": str(home(root)),
        # Prefect's own temporary server lets everybody in; ours is in tasks/servers/processes.py
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,tracking",
        # we print one line without a traceback ourselves
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        **without_telemetry(),
    }
    wanted = {key: value for key, value in wanted.items() if key not in os.environ}
    return wanted | own_server(root, api_url) if api_url and "PREFECT_API_URL" not in os.environ else wanted


def without_telemetry() -> dict[str, str]:
    """Disable telemetry."""
    return {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DVC_NO_ANALYTICS": "1",
    }
