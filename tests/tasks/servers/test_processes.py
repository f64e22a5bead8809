import base64
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from config.errors import EnvironmentFault
from config.ports import HOST, free_port, is_port_free
from config.sections.run import Tracking
from config.workspace.login import SERVERS, mlflow_password
from tasks.dvc.status import environment
from tasks.servers import processes
from tasks.servers.logins import asks_for_key, asks_for_login
from tasks.servers.plans import Plan, mlflow_plan, prefect_plan
from tasks.servers.prefect_settings import api_key, settings
from tasks.servers.processes import Server, prefect_api, start, stop
from tests.conftest import ROOT
from tracking import client

pytestmark = pytest.mark.integration

TRACKING = Tracking(uri="sqlite:///mlflow.db", experiment="e", registered_model="m", model="aligned")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop(tmp_path)


def tiny_plan(port: int, name: str = "mlflow") -> Plan:
    """A real HTTP server that answers /health: the module's own logic, without the seconds the big ones take."""
    code = (
        "import http.server as h\nclass H(h.SimpleHTTPRequestHandler):\n  def do_GET(s):\n    "
        "s.send_response(200); s.end_headers()\n"
        f"h.HTTPServer(('{HOST}', {port}), H).serve_forever()"
    )
    return Plan(name, port, f"--{name}-port", [sys.executable, "-c", code], {})


def test_a_server_is_found_again_and_not_started_twice(root: Path) -> None:
    plan = tiny_plan(free_port())
    (first,) = start(root, [plan])
    (again,) = start(root, [plan])
    assert first == again
    assert first.is_healthy()
    assert stop(root) == [first]
    assert not first.is_alive()
    assert is_port_free(plan.port)
    assert stop(root) == []


def test_a_port_in_use_is_one_line_and_starts_nothing(root: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        busy_port = other.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"port {busy_port} .*--prefect-port"):
            start(root, [tiny_plan(free_port()), tiny_plan(busy_port, "prefect")])
    assert processes.servers(root) == []


def test_a_server_that_ends_at_once_is_told_with_its_log(root: Path) -> None:
    plan = tiny_plan(free_port())._replace(command=[sys.executable, "-c", "raise SystemExit('no database')"])
    with pytest.raises(EnvironmentFault, match=r"mlflow server ended.*logs/mlflow\.log"):
        start(root, [plan])
    assert "no database" in (root / ".rlhf" / "logs" / "mlflow.log").read_text()


def test_a_killed_server_is_started_again(root: Path) -> None:
    plan = tiny_plan(free_port())
    (first,) = start(root, [plan])
    os.kill(first.pid, signal.SIGKILL)
    os.waitpid(first.pid, 0)
    (second,) = start(root, [plan])
    assert second.pid != first.pid


def ask(server: Server, path: str, body: Any = None, **headers: str) -> int:
    """The status of an answer, asked as a program asks: without a browser's rules."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=120)
    content = None if body is None else json.dumps(body)
    connection.request(
        "GET" if body is None else "POST", path, content, {"Content-Type": "application/json"} | headers
    )
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def basic(key: str) -> str:
    return f"Basic {base64.b64encode(key.encode()).decode()}"


def test_the_key_is_for_its_user_alone(tmp_path: Path) -> None:
    key = api_key(tmp_path)
    path = tmp_path / ".rlhf" / "prefect.key"
    assert (api_key(tmp_path), path.read_text()) == (key, key)
    assert len(key) >= 32
    assert api_key(tmp_path / "other") != key
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.chmod(0o640)
    with pytest.raises(EnvironmentFault, match="mode 640: other users"):
        api_key(tmp_path)


def test_our_key_is_not_sent_to_a_server_that_the_user_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(tmp_path, "http://ours/api")["PREFECT_API_AUTH_STRING"] == api_key(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    assert not {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING"} & set(settings(tmp_path, "http://ours/api"))


def test_a_stage_does_not_get_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in environment().values()


def as_another_user(work: Callable[[], object]) -> str:
    """What `work` gives in a process of the user nobody."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, repr(work()).encode())
        except BaseException as error:  # noqa: BLE001  nothing of the test's own may run on in this process
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as said:
        return said.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_gets_neither_key_nor_answer(up: list[Server], up_root: Path) -> None:
    key = up_root / ".rlhf" / "prefect.key"
    for folder in (up_root, *up_root.parents):
        # what keeps others out is to be ours, not the temporary folder's
        folder.chmod(folder.stat().st_mode | 0o011)
    assert as_another_user(lambda: up_root.stat().st_uid) == "0"
    assert as_another_user(key.read_text) == "PermissionError"
    assert as_another_user(lambda: ask(up[0], "/api/admin/settings")) == "401"
    assert as_another_user(lambda: ask(up[0], "/api/deployments/filter", {})) in ("401", "403")


def test_without_the_key_prefect_lists_creates_and_runs_nothing(up: list[Server], up_root: Path) -> None:
    prefect, key = up[0], api_key(up_root)
    assert ask(prefect, "/api/health") == 200
    assert ask(prefect, "/api/admin/settings", Authorization=basic(key)) == 200
    for wrong in ({}, {"Authorization": basic(key[:-1])}, {"Authorization": f"Bearer {key}"}):
        assert ask(prefect, "/api/admin/settings", **wrong) == 401
        assert ask(prefect, "/api/csrf-token?client=a", **wrong) == 401
        for path in ("/api/deployments/filter", "/api/deployments/", "/api/flow_runs/", "/api/work_pools/filter"):
            assert ask(prefect, path, {}, **wrong) in (401, 403)
    assert asks_for_key(up_root, prefect)


def test_under_a_foreign_name_even_the_key_opens_nothing(up: list[Server], up_root: Path) -> None:
    prefect, key = up[0], {"Authorization": basic(api_key(up_root))}
    for headers in (
        {"Host": f"example.org:{prefect.port}"},
        {"Host": f"{HOST}:1"},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
    ):
        for path in ("/", "/api/health", "/api/admin/settings"):
            assert ask(prefect, path, **key, **headers) == 403
    assert ask(prefect, "/api/admin/settings", **key, Host=f"localhost:{prefect.port}") == 200


def test_mlflow_refuses_foreign_names_and_origins(up: list[Server]) -> None:
    mlflow = up[1]
    body = {"max_results": 1}
    path = "/api/2.0/mlflow/experiments/search"
    assert ask(mlflow, path, body) == 200
    assert ask(mlflow, path, body, Host=f"example.org:{mlflow.port}") == 403
    assert ask(mlflow, path, body, Origin="http://example.org") == 403


@pytest.mark.slow
def test_a_temporary_server_ends_with_whoever_started_it_also_if_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\nfrom tasks.servers.processes import start_temporary\n"
        "print(start_temporary(pathlib.Path()), flush=True)\ntime.sleep(600)"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    port = int(asking.stdout.readline().rsplit(":", 1)[1].removesuffix("/api\n"))
    (server,) = psutil.Process(asking.pid).children()
    assert ask(Server("prefect", server.pid, 0, port), "/api/admin/settings") == 401
    asking.kill()
    asking.communicate()
    server.wait(120)


@pytest.fixture(scope="module")
def up_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up")


@pytest.fixture(scope="module")
def up(up_root: Path) -> Iterator[list[Server]]:
    """Prefect's and MLflow's server, for tests that only ask them."""
    tracking = mlflow_plan(up_root, TRACKING, free_port())
    assert tracking is not None
    try:
        yield start(up_root, [prefect_plan(up_root, free_port()), tracking])
    finally:
        stop(up_root)


def test_prefect_and_mlflow_come_up_on_the_projects_own_databases(up: list[Server], up_root: Path) -> None:
    running, root = up, up_root
    assert all(server.is_healthy() for server in running)
    assert prefect_api(root) == f"{running[0].url}/api"
    with (
        sqlite3.connect(root / "mlflow.db") as mlflow,
        sqlite3.connect(root / ".rlhf" / "prefect" / "prefect.db") as prefect,
    ):
        assert mlflow.execute("select count(*) from experiments").fetchone()[0] >= 1
        assert prefect.execute("select count(*) from flow_run").fetchone()[0] == 0
    mlflow.close()
    prefect.close()
    stop(root)
    assert prefect_api(root) is None


def test_with_a_login_mlflow_answers_who_can_read_the_projects_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in client.USER_VARIABLE, client.PASSWORD_VARIABLE, client.TOKEN_VARIABLE:
        monkeypatch.setenv(name, "of another test")  # whatever connect() sets is taken back
        monkeypatch.delenv(name)
    plan = mlflow_plan(tmp_path, TRACKING, free_port(), with_login=True)
    assert plan is not None
    (tmp_path / ".rlhf" / "mlflow.key").stat()
    try:
        (server,) = start(tmp_path, [plan])
        path, body = "/api/2.0/mlflow/experiments/search", {"max_results": 1}
        login = {"Authorization": basic(f"rlhf:{mlflow_password(tmp_path, server.url)}")}
        assert (ask(server, path, body), ask(server, "/"), ask(server, "/health")) == (401, 401, 200)
        assert (ask(server, path, body, **login), ask(server, "/", **login)) == (200, 200)
        assert ask(server, path, body, **login, Host=f"example.org:{server.port}") == 403
        assert ask(server, path, body, **login, Origin="http://example.org") == 403
        assert asks_for_login(tmp_path, server)
        tracking = TRACKING.model_copy(update={"uri": server.url})
        connection = client.connect(tmp_path, tracking)
        assert connection.client.get_experiment(connection.experiment_id).name == tracking.experiment
        client.log_in(tmp_path, f"http://tracking.example:{server.port}")
        assert client.PASSWORD_VARIABLE not in os.environ, "for our own server alone"
        killed = (tmp_path / SERVERS).read_text()
    finally:
        stop(tmp_path)
    (tmp_path / SERVERS).write_text(killed)
    client.log_in(tmp_path, server.url)
    assert client.PASSWORD_VARIABLE not in os.environ, "somebody else's process may listen there"
    assert (tmp_path / ".rlhf" / "mlflow.key").stat().st_mode & 0o777 == 0o600


def test_a_tracking_server_of_somebody_else_is_not_started(tmp_path: Path) -> None:
    assert mlflow_plan(tmp_path, TRACKING.model_copy(update={"uri": "http://tracking.example:5000"}), 5000) is None


def test_the_tracking_server_of_this_project_is_started_also_for_runs_that_name_it(tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path, TRACKING.model_copy(update={"uri": f"http://{HOST}:5123"}), 5123)
    assert plan is not None
    assert plan.environment["MLFLOW_BACKEND_STORE_URI"] == "sqlite:///mlflow.db"
    assert mlflow_plan(tmp_path, TRACKING.model_copy(update={"uri": f"http://{HOST}:5123"}), 5124) is None
