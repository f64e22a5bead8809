from collections.abc import Callable
from pathlib import Path

import pytest

from config.load import load
from tasks.run import Run, begin
from tests.stage_project import make_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Stages sft and reward; reward reads what sft makes."""
    return make_project(tmp_path / "project", tmp_path / "remote", ["sft", "reward"])


@pytest.fixture
def new_run(project: Path) -> Callable[..., Run]:
    """Begins a pipeline run in the project."""
    names = iter(range(100))

    def make(*overrides: str) -> Run:
        return begin(project, f"run-{next(names)}", load(project / "params.yaml", list(overrides)), {})

    return make
