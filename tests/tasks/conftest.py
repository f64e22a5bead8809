from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from config.load import load
from config.ports import free_port
from tasks.run.run import Run, begin_run
from tests.support.stage_project import make_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Stages sft and reward; reward reads what sft makes."""
    return make_project(tmp_path / "project", tmp_path / "remote", ["sft", "reward"])


@pytest.fixture
def new_run(project: Path) -> Callable[..., Run]:
    """Begins a pipeline run in the project."""
    names = iter(range(100))

    def make(*overrides: str) -> Run:
        return begin_run(project, f"run-{next(names)}", load(project / "params.yaml", list(overrides)), {})

    return make


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A store that speaks S3 on a free port, with one bucket."""
    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "very-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="store")
        yield "s3://store/dvc"
    server.stop()
