"""MLflow's server behind a user name and a password.

MLflow's own login needs packages that are not among ours, and a database of users. This one knows one user:
MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which MLflow's clients send by themselves and a browser asks
for. `python -m tracking.mlflow_server PORT` keeps runs in MLFLOW_BACKEND_STORE_URI and artifacts in
MLFLOW_ARTIFACTS_DESTINATION; foreign Hosts and Origins are refused by MLflow (MLFLOW_SERVER_ALLOWED_HOSTS).
"""

import argparse
import base64
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN = "/health"
"""Health check, open to everybody."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Login:
    """An ASGI middleware that asks for a name and a password (RFC 7617)."""

    def __init__(self, within: Application, user: str, password: str) -> None:
        self._within = within
        self._expected = b"Basic " + base64.b64encode(f"{user}:{password}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self._within(scope, receive, send)
        elif scope["type"] == "http":
            await _ask(send)
        else:  # closed before it was accepted: answered with 403
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN:
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)


async def _ask(send: Send) -> None:
    body = b"MLflow asks for a name and a password.\n"
    headers = [
        (b"www-authenticate", b'Basic realm="MLflow", charset="UTF-8"'),
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def application(user: str, password: str, database: str, artifacts: str) -> Application:
    """MLflow's application, its database created or migrated, as `mlflow server` does."""
    from mlflow.server import constants

    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: artifacts,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }
    from mlflow.server.fastapi_app import app  # read at import
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(database, database, "mlflow-artifacts:/")
    return Login(app, user, password)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--listen", default="127.0.0.1", help="address to listen on")
    options = parser.parse_args()
    names = (
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_BACKEND_STORE_URI",
        "MLFLOW_ARTIFACTS_DESTINATION",
    )
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        sys.exit(f"{', '.join(missing)} not set: the server needs all of {', '.join(names)}.")
    uvicorn.run(
        application(*(os.environ[name] for name in names)),
        host=options.listen, port=options.port, log_level="warning", timeout_graceful_shutdown=5,
    )  # fmt: skip


if __name__ == "__main__":
    main()
