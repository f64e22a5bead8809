"""The flow on a real Prefect server, over stages that are quick."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.testing.utilities import prefect_test_harness

from config import jsonl
from config.errors import UserError
from config.load import load
from config.records import STAGES, AttemptRow, PipelineRow
from flows.rlhf import rlhf
from tests.stage_project import make_project

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Prefect's own clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def project(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_project(tmp_path / "project", tmp_path / "remote", STAGES)
    monkeypatch.chdir(root)
    return root


def run(root: Path) -> Any:
    return rlhf(load(root / "params.yaml"), return_state=True)


def task_states(state: Any) -> dict[str, tuple[str, int]]:
    """Task -> (name of its state, how often it was run)."""
    with get_client(sync_client=True) as client:
        by_run = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        return {task.name.rsplit("-", 1)[0]: (task.state.name, task.run_count) for task in client.read_task_runs(task_run_filter=by_run)}


def ends(root: Path) -> list[str]:
    return [row.state for row in jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows if row.event == "end"]


def test_every_stage_is_a_task_and_an_unchanged_one_is_cached(project: Path) -> None:
    state = run(project)
    assert state.is_completed()
    assert task_states(state) == {**dict.fromkeys(STAGES, ("Completed", 1)), "report": ("Completed", 1)}
    assert (project / "report" / "report.html").exists()
    (project / "sft.out").write_text("changed by hand")
    state = run(project)
    # sft is made again, with the same content as before: nothing after it has to be
    cached = dict.fromkeys(STAGES, ("Cached", 1))
    assert task_states(state) == {**cached, "sft": ("Completed", 1), "report": ("Completed", 1)}
    assert ends(project) == ["completed", "completed"]


def test_bad_input_fails_the_flow_at_once_with_the_stages_line(project: Path) -> None:
    (project / "behaviour.txt").write_text("bad input")
    state = run(project)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, UserError)
    assert str(error) == "data: data/x.json is empty. Fetch it again."
    assert task_states(state) == {"data": ("Failed", 1)}
    assert ends(project) == ["failed"]


def test_a_killed_stage_is_tried_again_and_the_flow_completes(project: Path) -> None:
    (project / "behaviour.txt").write_text("killed once")
    state = run(project)
    assert state.is_completed()
    assert {name: count for name, (_, count) in task_states(state).items()} == {**dict.fromkeys(STAGES, 2), "report": 1}


def test_a_failure_that_repeats_is_not_tried_for_ever(project: Path) -> None:
    (project / "behaviour.txt").write_text("diverges")
    state = run(project)
    assert state.is_failed()
    assert task_states(state) == {"data": ("Failed", 2)}


def test_sigterm_ends_the_flow_in_the_state_stopped(project: Path) -> None:
    (project / "behaviour.txt").write_text("slow")
    usage = project / "runs" / "data" / "usage.jsonl"

    def ask() -> None:
        deadline = time.monotonic() + 60
        while not usage.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    state = run(project)
    asking.join()
    assert (state.name, state.is_cancelled()) == ("Stopped", True)
    assert task_states(state) == {"data": ("Stopped", 1)}
    assert ends(project) == ["stopped"]
    rows = jsonl.read(project / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    assert [row.exit_code for row in rows if row.event == "end"] == [75]
    (run_id,) = {row.run_id for row in rows}
    report, kept = project / "report" / "report.html", project / "runs" / "pipeline" / run_id / "report" / "report.html"
    assert "Not evaluated" in report.read_text()
    assert "data was asked to stop" in report.read_text()
    assert kept.read_bytes() == report.read_bytes()
