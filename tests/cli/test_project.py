import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.project import project_root, typed_path
from config.errors import EnvironmentFault


def test_a_command_works_from_a_folder_of_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is named there is meant from there."""
    below = project / "data" / "raw"
    below.mkdir(parents=True)
    text = (project / "params.yaml").read_text().replace("seed: ", "seed: 1")
    (below / "mine.yaml").write_text(text)
    monkeypatch.chdir(below)
    done = CliRunner().invoke(app, ["plan", "--recipe", "mine.yaml", "--html", "plan.html"], catch_exceptions=False)
    assert done.stdout.strip() == "data/raw/plan.html"
    assert (below / "plan.html").exists()
    assert Path.cwd() == project
    assert json.loads(CliRunner().invoke(app, ["clean", "--json"]).output)


def test_the_nearest_project_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = project / "inner" / "deep"
    inner.mkdir(parents=True)
    (project / "inner" / "dvc.yaml").touch()
    monkeypatch.chdir(inner)
    assert typed_path("a/b.yaml") == Path("deep/a/b.yaml")
    assert typed_path("../../params.yaml") == Path("../params.yaml")
    assert project_root() == project / "inner"
    assert typed_path("a/b.yaml") == Path("a/b.yaml")


def test_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed_path("a.yaml") == Path("a.yaml")
    with pytest.raises(EnvironmentFault, match=r"has no dvc\.yaml.*change to the checkout first"):
        project_root()
