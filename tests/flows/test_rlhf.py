"""The flow on a real Prefect server, over stages that are quick."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from config import jsonl
from config.errors import CostError, UserError
from config.load import load
from config.records import AttemptRow, stages_of
from config.workspace.rows import pipeline_rows
from flows.rlhf import rlhf
from tasks.planning.prepared import known_plan, prepare
from tests.conftest import ROOT
from tests.support.stage_project import make_project

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Prefect's own clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STAGES = stages_of("ppo")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def project(server: None, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_project(tmp_path / "project", tmp_path / "remote", STAGES)
    shutil.copyfile(empty_database, root / "mlflow.db")
    monkeypatch.chdir(root)
    return root


def run(root: Path, *changes: str) -> Any:
    return rlhf(load(root / "params.yaml", list(changes)), return_state=True)


def task_states(state: Any) -> dict[str, tuple[str, int]]:
    """Task -> (name of its state, how often it was run)."""
    with get_client(sync_client=True) as client:
        by_run = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        return {
            task.name.rsplit("-", 1)[0]: (task.state.name, task.run_count)
            for task in client.read_task_runs(task_run_filter=by_run)
        }


def ends(root: Path) -> list[str]:
    return [row.state for row in pipeline_rows(root) if row.event == "end"]


def test_every_stage_is_a_task_and_an_unchanged_one_is_cached(project: Path) -> None:
    state = run(project)
    assert state.is_completed()
    assert task_states(state) == {**dict.fromkeys(("plan", *STAGES, "report"), ("Completed", 1))}
    assert (project / "report" / "report.html").exists()
    cached = dict.fromkeys(STAGES, ("Cached", 1)) | dict.fromkeys(("plan", "report"), ("Completed", 1))
    (project / "sft.out").write_text("changed by hand")
    assert task_states(run(project)) == cached, "what sft made comes back from DVC's cache"
    assert (project / "sft.out").read_text() != "changed by hand"
    # with another parameter sft is made again, with the same content as before: nothing after it has to be
    assert task_states(run(project, "sft.epochs=9.0")) == cached | {"sft": ("Completed", 1)}
    assert ends(project) == ["completed"] * 3


def test_bad_input_fails_the_flow_at_once_with_the_stages_line(project: Path) -> None:
    (project / "behaviour.txt").write_text("bad input")
    before = (project / "params.yaml").read_bytes()
    state = run(project, "seed=99")
    assert (project / "params.yaml").read_bytes() == before, "what it asked for does not stick"
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, UserError)
    assert str(error) == "data: data/x.json is empty. Fetch it again."
    assert task_states(state) == {"plan": ("Completed", 1), "data": ("Failed", 1)}
    assert ends(project) == ["failed"]


@pytest.mark.slow
def test_a_killed_stage_is_tried_again_and_the_flow_completes(project: Path) -> None:
    (project / "behaviour.txt").write_text("killed once")
    state = run(project)
    assert state.is_completed()
    assert {name: count for name, (_, count) in task_states(state).items()} == {
        **dict.fromkeys(STAGES, 2),
        "plan": 1,
        "report": 1,
    }


@pytest.mark.parametrize(("behaviour", "attempts"), [("fails alike", 2), ("diverges", 1)])
def test_a_failure_that_would_repeat_is_not_paid_for_again(project: Path, behaviour: str, attempts: int) -> None:
    (project / "behaviour.txt").write_text(behaviour)
    state = run(project)
    assert state.is_failed()
    assert task_states(state) == {"plan": ("Completed", 1), "data": ("Failed", attempts)}
    rows = jsonl.read(project / "runs/data/attempts.jsonl", AttemptRow).rows
    assert [row.event for row in rows] == ["start", "end"] * attempts


def test_a_run_is_complete_though_its_report_cannot_be_written(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "report").write_text("a file where the folder should be")
    state = run(project)
    assert state.is_completed()
    assert ends(project) == ["completed"]
    assert "warning: the report could not be written" in capsys.readouterr().err
    (kept,) = (project / "runs/pipeline").iterdir()
    assert (kept / "dvc.lock").exists()


def test_edits_made_while_a_run_starts_are_kept(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = load(project / "params.yaml")
    assert rlhf(params, return_state=True).is_completed()
    edited = "# mine\n" + (project / "params.yaml").read_text().replace("seed: 1", "seed: 5")
    (project / "params.yaml").write_text(edited)  # after the command has read it
    assert rlhf(params, return_state=True).is_completed()
    assert load(project / "params.yaml") == params
    assert (project / "params.yaml.bak").read_text() == edited
    assert "they are in params.yaml.bak" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_to_stop_ends_the_flow_in_the_state_stopped(project: Path, number: signal.Signals) -> None:
    (project / "behaviour.txt").write_text("slow")
    usage = project / "runs" / "data" / "usage.jsonl"

    def ask() -> None:
        deadline = time.monotonic() + 60
        while not usage.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    state = run(project)
    asking.join()
    assert (state.name, state.is_cancelled()) == ("Stopped", True)
    assert task_states(state) == {"plan": ("Completed", 1), "data": ("Stopped", 1)}
    assert ends(project) == ["stopped"]
    rows = jsonl.read(project / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    assert [row.exit_code for row in rows if row.event == "end"] == [75]
    (run_id,) = {row.run_id for row in rows}
    report, kept = (
        project / "report" / "report.html",
        project / "runs" / "pipeline" / run_id / "report" / "report.html",
    )
    assert "Not evaluated" in report.read_text()
    assert "data was asked to stop" in report.read_text()
    assert kept.read_bytes() == report.read_bytes()


def test_a_run_planned_above_its_budget_is_refused_before_anything_starts(project: Path) -> None:
    state = run(project, "budget.max_usd=0.0001")
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, CostError)
    assert "budget.max_usd=0.0001 does not allow it" in str(error)
    assert task_states(state) == {"plan": ("Failed", 1)}
    assert ends(project) == []
    assert not (project / "runs").exists()


def test_a_run_that_reaches_its_budget_ends_over_budget_and_goes_on_when_it_is_raised(project: Path) -> None:
    (project / "behaviour.txt").write_text("long")
    state = run(project, "prices.usd_per_device_hour=3.6", "budget.max_usd=0.005", "budget.gate=warn")
    assert (state.name, state.is_cancelled()) == ("OverBudget", True)
    assert "budget.max_usd=0.005 is reached" in state.message
    assert task_states(state) == {"plan": ("Completed", 1), "data": ("OverBudget", 1)}
    assert ends(project) == ["over_budget"]
    (project / "behaviour.txt").unlink()
    assert run(project, "budget.max_usd=9").is_completed()
    rows = jsonl.read(project / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    assert [row.event for row in rows] == ["start", "end", "start", "resume", "end"]
    assert [row.exit_code for row in rows if row.event == "end"] == [75, 0]
    first, second = (row for row in pipeline_rows(project) if row.event == "start")
    assert second.detail["continues"] == first.run_id
    kept = json.loads((project / "runs" / "pipeline" / second.run_id / "plan.json").read_text())
    assert kept["spent"]["data"]["usd"] >= 0.004


def test_a_run_that_was_planned_before_it_started_is_not_planned_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "behaviour.txt").write_text("bad input")
    prepared = prepare(project, load(project / "params.yaml", ["seed=99"]))
    monkeypatch.setattr("tasks.planning.gate.prepare", lambda *_: pytest.fail("planned twice"))
    with known_plan(prepared):
        state = run(project, "seed=99")
    assert task_states(state) == {"plan": ("Completed", 1), "data": ("Failed", 1)}


def test_a_run_that_a_server_starts_above_the_threshold_waits_until_somebody_resumes_it(project: Path) -> None:
    with served(project), get_client(sync_client=True) as client:
        params = load(project / "params.yaml", ["budget.approval_usd=0.001"]).model_dump(mode="json")
        deployment = client.read_deployment_by_name("rlhf/tested")
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters={"params": params})
        await_state(client, flow_run.id, "Paused")
        assert not (project / "runs").exists(), "nothing has been started"
        plans = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        )
        assert [plan.key for plan in plans] == ["plan"]
        assert "| ppo |" in plans[0].data
        client.resume_flow_run(flow_run.id)
        await_state(client, flow_run.id, "Completed")
    assert ends(project) == ["completed"]


@contextmanager
def served(project: Path, module: str = "flows.rlhf", flow: str = "rlhf") -> Iterator[None]:
    """A flow as a deployment, served from the project's folder by a process of its own."""
    code = (
        f"from {module} import {flow} as served\nfrom prefect.flows import EntrypointType\n"
        "served.serve(name='tested', entrypoint_type=EntrypointType.MODULE_PATH, "
        "print_starting_message=False)"
    )
    environment = {
        **os.environ,
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = project.parent / "served.txt"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=project, env=environment, stdout=said, stderr=said
        )
    try:
        deadline = time.monotonic() + 120
        with get_client(sync_client=True) as client:
            while not [
                deployment
                for deployment in client.read_deployments()
                if deployment.name == "tested" and deployment.entrypoint == f"{module}.{flow}"
            ]:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.3)
        yield
    # nothing of it is needed any more, and its own end may wait forever on a run that has just ended
    finally:
        runner = psutil.Process(process.pid)
        for item in [*runner.children(recursive=True), runner]:
            with suppress(psutil.NoSuchProcess):
                item.kill()
        process.wait(60)


def await_state(client: SyncPrefectClient, flow_run_id: UUID, name: str) -> None:
    deadline = time.monotonic() + 180
    while (state := client.read_flow_run(flow_run_id).state) is None or state.name != name:
        assert time.monotonic() < deadline, state
        assert state is None or not state.is_final(), state
        time.sleep(0.3)
