"""What several tests of commands need."""

from pathlib import Path

import pytest

from config.load import load, write
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder in which nothing was run yet; the test works in it."""
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    write(load(ROOT / "recipes" / "demo.yaml"), tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path
