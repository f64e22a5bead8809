"""Processes die and servers go away in the middle of a run: what Prefect and MLflow know afterwards. Real servers, a
real worker.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling, Pending

from config import jsonl
from config.records import AttemptRow, MetricRow, stages_of
from config.workspace.rows import pipeline_rows
from tasks.deployment.automations import NOTICES, silent_automation, unstarted_automation
from tasks.servers.processes import servers
from tests.flows.stack import PATIENCE_SECONDS, Stack, stack
from tracking.rows import PREFIXES

pytestmark = [
    pytest.mark.slow,  # one signal, one kill and one stop are in test_rlhf.py
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Prefect's own clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


FOLLOWING = ("rlhf: living runs", "rlhf: runs that never started", "rlhf: zombie runs")


@pytest.fixture(scope="module")
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a webhook, and what it received."""
    messages: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", messages
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, webhook: tuple[str, list[dict[str, Any]]]) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack"), "--notify", webhook[0]) as running:
        yield running
    assert servers(running.root) == []


def at_work(up: Stack, run: UUID, stage: str = "data") -> psutil.Process:
    """The process of a run whose stage has made a step."""
    usage = up.root / "runs" / stage / "usage.jsonl"
    before = usage.stat().st_size if usage.exists() else 0
    await_true(lambda: usage.exists() and usage.stat().st_size > before + 200, up)
    return psutil.Process(
        int(str(up.await_run(run, lambda found: found.infrastructure_pid is not None).infrastructure_pid))
    )


def await_true(condition: Any, up: Stack) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, up.worker_log()[-3000:]
        time.sleep(0.2)


def ends(up: Stack) -> list[str]:
    return [row.state for row in pipeline_rows(up.root) if row.event == "end"]


def test_a_run_that_finishes_is_told_with_its_cost(up: Stack, webhook: tuple[str, list[dict[str, Any]]]) -> None:
    run = up.await_end(up.start())
    assert run.state_name == "Completed"
    await_true(lambda: webhook[1], up)
    assert [message["event"] for message in webhook[1]] == ["rlhf.run.finished"]
    assert webhook[1][0]["run"].endswith(run.name)
    shown = up.artifacts(run.id)
    assert float(shown["run"]) == 100
    assert (
        f"#/experiments/1/runs/{mlflow_run(up, run.name).info.run_id}/artifacts/report/report.html" in shown["result"]
    )


def mlflow_run(up: Stack, name: str) -> Any:
    client = MlflowClient(f"sqlite:///{up.root / 'mlflow.db'}")
    tagged = [(run, run.data.tags) for run in client.search_runs(["1"])]
    (result,) = [
        run for run, tags in tagged if tags.get("rlhf.run_id", "").endswith(name) and "rlhf.stage" not in tags
    ]
    return result


def test_a_killed_run_is_ended_and_the_next_one_goes_on(up: Stack, webhook: tuple[str, list[dict[str, Any]]]) -> None:
    up.behave("long")
    killed, waiting = up.start(), up.start()
    at_work(up, killed).kill()
    dead = up.await_end(killed)
    assert dead.state_type == StateType.CRASHED
    up.behave_from_now("")
    assert up.await_end(waiting).state_name == "Completed"
    assert ends(up)[-2:] == ["killed", "completed"]
    rows = jsonl.read(up.root / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    name = up.run(waiting).name
    again = [row for row in rows if row.run_id.endswith(name) and row.event == "start" and row.step == 0]
    assert not again, "the stage that outlived its run checkpointed or finished: nothing is done twice"
    await_true(lambda: any(message["event"] == "prefect.flow-run.Crashed" for message in webhook[1]), up)


@contextmanager
def impatient(up: Stack) -> Iterator[None]:
    """Have the server wait 10 s for a sign of life, less than the time between two heartbeats."""
    for wanted in (silent_automation(), unstarted_automation()):
        (result,) = up.client.read_automations_by_name(wanted.name)
        trigger = wanted.trigger.model_copy(update={"within": timedelta(seconds=10)})
        up.client.update_automation(result.id, wanted.model_copy(update={"trigger": trigger}))
    try:
        yield
    finally:
        up.up()
    (restored,) = up.client.read_automations_by_name(silent_automation().name)
    assert restored.trigger.model_dump()["within"] == timedelta(seconds=120)


def test_a_run_killed_with_its_worker_is_ended_by_the_server(up: Stack) -> None:
    up.behave("long")
    with impatient(up):
        killed, waiting, claimed = up.start(), up.start(), up.start()
        process = at_work(up, killed)
        os.kill(up.server("worker").pid, signal.SIGKILL)
        process.kill()
        up.client.set_flow_run_state(claimed, Pending(), force=True)  # as the worker leaves it
        assert up.run(killed).state_name == "Running", "nobody is left who could tell"
        for run, reason in ((killed, "No heartbeat for"), (claimed, "Pending for")):
            ended = up.await_end(run)
            assert (ended.state_name, ended.state_type) == ("Zombie", StateType.CRASHED)
            assert str(ended.state and ended.state.message).startswith(reason)
        assert up.run(waiting).state_type == StateType.SCHEDULED
        assert "killed" in up.rlhf("status")
    assert ends(up)[-1] == "killed"
    up.behave_from_now("")
    up.up()
    assert up.await_end(waiting).state_name == "Completed"


def test_a_live_run_that_was_taken_for_a_zombie_is_set_back_to_running(up: Stack) -> None:
    up.behave("long")
    with impatient(up):
        run = up.start()
        at_work(up, run)
        assert up.await_end(run).state_name == "Zombie", "it was silent for 10 s"
        await_true(lambda: up.run(run).state_name == "Running", up)
    up.behave_from_now("")
    assert up.await_end(run).state_name == "Completed"


def test_a_cancelled_run_checkpoints(up: Stack) -> None:
    up.behave("long")
    run = up.start()
    at_work(up, run)
    up.client.set_flow_run_state(run, Cancelling())
    assert up.await_end(run).state_type == StateType.CANCELLED
    rows = jsonl.read(up.root / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    assert [(row.event, row.exit_code) for row in rows][-1] == ("end", 75)
    assert ends(up)[-1] == "stopped"


def test_servers_that_restart_in_the_middle_of_a_run_lose_nothing(up: Stack) -> None:
    up.behave("slow")
    run = up.start(tracking__uri=up.server("mlflow").url)
    at_work(up, run, "sft")
    for name in ("prefect", "mlflow"):
        os.killpg(up.server(name).pid, signal.SIGKILL)
    size = (up.root / "runs" / "sft" / "usage.jsonl").stat().st_size
    await_true(lambda: (up.root / "runs" / "sft" / "usage.jsonl").stat().st_size > size, up)
    up.up()
    assert up.await_end(run).state_name == "Completed"
    # what is left, if MLflow came back after the end; nothing is shipped twice
    up.rlhf("report", "--sync")
    name = up.run(run).name
    client = MlflowClient(up.server("mlflow").url)
    run_id = next(row.run_id for row in pipeline_rows(up.root) if row.run_id.endswith(name))
    children = {
        search_run.data.tags["rlhf.stage"]: search_run
        for search_run in client.search_runs(["1"])
        if search_run.data.tags.get("rlhf.run_id") == run_id and "rlhf.stage" in search_run.data.tags
    }
    for stage in stages_of("ppo"):
        rows = [
            row
            for row in jsonl.read(up.root / "runs" / stage / "metrics.jsonl", MetricRow).rows
            if row.run_id == run_id
        ]
        arrived = client.get_metric_history(children[stage].info.run_id, f"{PREFIXES.get(stage, stage)}/loss")
        assert sorted((point.step, point.value) for point in arrived) == sorted(
            (row.step, row.values["loss"]) for row in rows
        )
        assert [row.step for row in rows] == list(range(rows[0].step, 9)), (
            "data may go on from where the test before cancelled it"
        )


def test_every_notice_is_an_automation_and_none_is_doubled(up: Stack) -> None:
    up.up()
    names = [automation.name for automation in up.client.read_automations()]
    assert sorted(names) == sorted([*FOLLOWING, *(notice.name for notice in NOTICES)])
