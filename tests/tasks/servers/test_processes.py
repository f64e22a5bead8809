import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.errors import EnvironmentFault
from config.sections.run import Tracking
from tasks.servers import processes
from tasks.servers.processes import (
    HOST,
    Plan,
    is_port_free,
    mlflow_plan,
    prefect_api,
    prefect_plan,
    start,
    stop,
)
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

TRACKING = Tracking(uri="sqlite:///mlflow.db", experiment="e", registered_model="m")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop(tmp_path)


def tiny_plan(port: int, name: str = "mlflow") -> Plan:
    """A real HTTP server that answers /health: the module's own logic, without the seconds the big
    ones take.
    """
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
        taken = other.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"port {taken} .*--prefect-port"):
            start(root, [tiny_plan(free_port()), tiny_plan(taken, "prefect")])
    assert processes.servers(root) == []


def test_a_server_that_ends_at_once_is_told_with_its_log(root: Path) -> None:
    plan = tiny_plan(free_port())._replace(
        command=[sys.executable, "-c", "raise SystemExit('no database')"]
    )
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


def test_prefect_and_mlflow_come_up_on_the_projects_own_databases(root: Path) -> None:
    tracking = mlflow_plan(root, TRACKING, free_port())
    assert tracking is not None
    running = start(root, [prefect_plan(root, free_port()), tracking])
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


def test_a_tracking_server_of_somebody_else_is_not_started(tmp_path: Path) -> None:
    assert (
        mlflow_plan(
            tmp_path, TRACKING.model_copy(update={"uri": "http://tracking.example:5000"}), 5000
        )
        is None
    )


def test_the_tracking_server_of_this_project_is_started_also_for_runs_that_name_it(
    tmp_path: Path,
) -> None:
    plan = mlflow_plan(tmp_path, TRACKING.model_copy(update={"uri": f"http://{HOST}:5123"}), 5123)
    assert plan is not None
    assert plan.environment["MLFLOW_BACKEND_STORE_URI"] == "sqlite:///mlflow.db"
    assert (
        mlflow_plan(tmp_path, TRACKING.model_copy(update={"uri": f"http://{HOST}:5123"}), 5124)
        is None
    )
