"""What ends a retrain cycle before it trains, on a real Prefect server; the whole cycle is in
tests/e2e/test_retrain.py.
"""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.testing.utilities import prefect_test_harness

from config import jsonl
from config.errors import EnvironmentFault, UserError
from config.load import load
from config.records import stages_of
from config.workspace.champions import (
    Champion,
    ChampionRecord,
    Event,
    champion_folder,
    write_record,
)
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from flows.retrain import retrain
from tasks.dvc.data_key import key_now
from tests.support.stage_project import make_project

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
def project(
    server: None, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    root = make_project(tmp_path / "project", tmp_path / "remote", stages_of("ppo"))
    shutil.copyfile(empty_database, root / "mlflow.db")
    monkeypatch.chdir(root)
    return root


def cycle(root: Path) -> Any:
    return retrain(load(root / "params.yaml"), return_state=True)


def a_champion(root: Path, data_key: str) -> None:
    """A record and a folder without files: enough for whoever does not read them."""
    entry = Champion(
        run_id="r1", method="ppo", model_digest="m", data_version="d", data_key=data_key
    )
    event = Event(time=1.0, event="promoted", champion="r1", before=None, by="test", why="test")
    write_record(root, ChampionRecord(lineage=(entry,), events=(event,)))
    champion_folder(root, "r1").mkdir()
    (champion_folder(root, "r1") / "files.json").write_text("{}")


def ends(root: Path) -> list[RetrainRow]:
    return [row for row in jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows if row.event == "end"]


def artifacts(state: Any) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        by_run = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id])
        )
        return {found.key: found.data for found in client.read_artifacts(artifact_filter=by_run)}


def test_without_a_champion_there_is_nothing_to_compare_with(project: Path) -> None:
    state = cycle(project)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, UserError)
    assert str(error).endswith("Name one first: rlhf promote last.")
    assert [row.outcome for row in ends(project)] == ["failed"]


def test_unchanged_inputs_end_the_cycle_as_skipped_with_an_artifact(project: Path) -> None:
    a_champion(project, key_now(project, load(project / "params.yaml")) or "")
    state = cycle(project)
    assert (state.name, state.is_completed()) == ("Skipped", True)
    (row,) = ends(project)
    assert (row.outcome, row.detail) == ("skipped", {"champion": "r1", "usd": 0.0})
    assert artifacts(state)["retrain"].startswith("# Retrain: skipped")
    assert not (project / "runs" / "pipeline.jsonl").exists()


def test_a_cycle_that_overlaps_another_says_so_in_a_line_and_is_skipped(project: Path) -> None:
    (project / ".rlhf").mkdir()
    with (project / ".rlhf" / "retrain.lock").open("a+") as other:
        other.write("4711")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        state = cycle(project)
    assert state.name == "Skipped"
    assert (
        ends(project)[-1].said
        == "a cycle is running already (process 4711), and this one has nothing to add to it"
    )


def test_a_run_at_work_in_the_checkout_is_not_disturbed(project: Path) -> None:
    (project / ".rlhf").mkdir()
    with (project / ".rlhf" / "run.lock").open("a+") as other:
        other.write("4712")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        state = cycle(project)
    assert state.name == "Skipped"
    assert "process 4712 is already running the pipeline" in ends(project)[-1].said


@pytest.mark.slow
def test_a_champion_whose_files_were_deleted_is_named(project: Path) -> None:
    a_champion(project, "of other data")
    shutil.rmtree(champion_folder(project, "r1"))
    state = cycle(project)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, EnvironmentFault)
    assert "the champion r1 cannot be used: champions/r1 was deleted" in str(error)
