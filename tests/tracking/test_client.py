import subprocess
import sys
import time
from pathlib import Path

from mlflow import MlflowClient

from tracking.client import artifact_location, create_database

ROOT = Path(__file__).parents[2]


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
