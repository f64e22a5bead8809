"""MLflow behind a name and a password: the real application, asked without a socket."""

import asyncio
import base64
import subprocess
import sys

import httpx
import pytest

from tests.conftest import ROOT
from tracking.mlflow_server import Application, Login

SEARCH = "/api/2.0/mlflow/experiments/search"
ASKED = """
import sys
from starlette.testclient import TestClient
from tracking.mlflow_server import application
asked = TestClient(application("rlhf", "secret", f"sqlite:///{sys.argv[1]}/mlflow.db", sys.argv[1]), base_url="http://localhost:5000")
path, body = "SEARCH", {"max_results": 5}
print(asked.get("/health").status_code, asked.get("/").status_code, asked.post(path, json=body).status_code,
      asked.post(path, json=body, auth=("rlhf", "wrong")).status_code)
found = asked.post(path, json=body, auth=("rlhf", "secret"))
print(found.status_code, found.json()["experiments"][0]["name"])
put = asked.put("/api/2.0/mlflow-artifacts/artifacts/kept.txt", content=b"kept", auth=("rlhf", "secret"))
print(put.status_code, asked.get("/api/2.0/mlflow-artifacts/artifacts/kept.txt", auth=("rlhf", "secret")).text)
print(asked.get(path, headers={"Host": "foreign.example"}, auth=("rlhf", "secret")).status_code)
""".replace("SEARCH", SEARCH)


async def inner(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"inside"})  # type: ignore[operator]


def status(path: str, headers: list[tuple[str, str]]) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app=Login(inner, "rlhf", "secret"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(ask())


def basic(text: str) -> tuple[str, str]:
    return "Authorization", "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/", [basic("rlhf:secret")], 200),
        ("/health", [], 200),
        ("/", [], 401),
        ("/", [basic("rlhf:")], 401),
        ("/", [basic("rlhf:secret2")], 401),
        ("/", [basic("rlhf:secret"), basic("rlhf:other")], 401),
        ("/health/../api", [], 401),
        ("/x/health", [], 401),
    ],
)
def test_only_the_name_with_its_password_is_answered(path: str, headers: list[tuple[str, str]], expected: int) -> None:
    assert status(path, headers) == expected


def test_a_websocket_without_login_is_closed() -> None:
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    within: Application = Login(inner, "rlhf", "secret")
    asyncio.run(within({"type": "websocket", "headers": [], "path": "/health"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.integration
def test_mlflow_itself_is_behind_it(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["200 401 401 401", "200 Default", "200 kept", "403"], done.stderr[-2000:]
