"""Settings of the Prefect that this project uses: its own state below .rlhf/, quiet, on the server
of `rlhf up` if there is one.

They are environment variables because Prefect reads them when it is imported; set them before
importing `flows`.
"""

import os
from pathlib import Path

from config.errors import EnvironmentFault
from tasks.run.run import STATE_FOLDER

STARTUP_TIMEOUT_SECONDS = 120
"""The temporary server takes 4 s on a fast machine, and more than Prefect's 20 s on a busy one."""


def home(root: Path) -> Path:
    """PREFECT_HOME, made if need be: results and the database, shared by the temporary server and
    the one of `rlhf up`.

    Raises EnvironmentFault if it can not be written.
    """
    folder = (root / STATE_FOLDER / "prefect").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # Prefect does not make the folders above it
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} can not be made ({error.strerror}). Make {root} writable for this user."
        ) from None
    return folder


def settings(root: Path, api_url: str | None) -> dict[str, str]:
    """Environment of a process that runs flows; `api_url` None starts a temporary server. What the
    user has set stays.
    """
    wanted = {
        "PREFECT_HOME": str(home(root)),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(STARTUP_TIMEOUT_SECONDS),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,tracking",
        # we tell the user ourselves, in one line and without traceback
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        **without_telemetry(),
    }
    if api_url:
        wanted["PREFECT_API_URL"] = api_url
    return {key: value for key, value in wanted.items() if key not in os.environ}


def without_telemetry() -> dict[str, str]:
    """Nothing of ours calls home."""
    return {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DVC_NO_ANALYTICS": "1",
    }
