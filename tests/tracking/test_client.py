import subprocess
import sys
import time
from pathlib import Path

from mlflow import MlflowClient

from config.load import load
from tests.conftest import ROOT
from tracking.client import artifact_location, connect, create_database, ensure_run, log_folder


def test_a_database_whose_creation_was_killed_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "mlflow.db"
    uri = f"sqlite:///{target}"
    code = f"from tracking.client import create_database; create_database({uri!r})"
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".mlflow.db.*/mlflow.db")):
        assert time.monotonic() < deadline
        assert maker.poll() is None
        time.sleep(0.005)
    maker.kill()
    maker.wait()
    assert not target.exists()
    create_database(uri)
    assert [experiment.name for experiment in MlflowClient(uri).search_experiments()] == ["Default"]


def test_artifacts_go_beside_an_sqlite_file_else_into_the_project_or_to_the_server(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    here = (tmp_path / "mlartifacts").as_uri()
    beside = (elsewhere / "mlartifacts").as_uri()
    assert artifact_location(tmp_path, f"sqlite:///{tmp_path}/mlflow.db") == here
    assert artifact_location(tmp_path, f"sqlite:///{elsewhere}/mlflow.db") == beside
    assert artifact_location(tmp_path, "postgresql://user@host/mlflow") == here
    assert artifact_location(tmp_path, "http://127.0.0.1:5000") is None


def test_artifacts_follow_a_project_that_was_moved(tmp_path: Path) -> None:
    """MLflow would go on writing into the old folder, which it makes anew."""
    tracking = load(ROOT / "recipes/demo.yaml").tracking
    before, now = tmp_path / "before", tmp_path / "now"
    (before / "report").mkdir(parents=True)
    (before / "report/page.html").write_text("page")
    connection = connect(before, tracking)
    log_folder(connection, ensure_run(connection, "one", "one", 0.0, {}), before / "report")
    before.rename(now)
    connection = connect(now, tracking)
    two = ensure_run(connection, "two", "two", 0.0, {})
    log_folder(connection, two, now / "report")
    for key in ("one", "two"):
        run_id = ensure_run(connection, key, key, 0.0, {})
        assert (
            connection.client.get_run(run_id).info.artifact_uri
            == (now / "mlartifacts" / run_id / "artifacts").as_uri()
        )
        assert [item.path for item in connection.client.list_artifacts(run_id)] == ["page.html"]
    assert not before.exists()


def test_a_location_that_someone_chose_stays(tmp_path: Path) -> None:
    tracking = load(ROOT / "recipes/demo.yaml").tracking
    create_database(f"sqlite:///{tmp_path}/mlflow.db")
    MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").create_experiment(
        tracking.experiment, artifact_location="s3://b/a"
    )
    connection = connect(tmp_path, tracking)
    assert connection.client.get_experiment(connection.experiment_id).artifact_location == "s3://b/a"
