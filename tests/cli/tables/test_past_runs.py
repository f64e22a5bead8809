"""`rlhf runs` on the files of two runs, and what `rlhf restore` refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from config.errors import UserError
from config.records import kept_folder
from reporting.gallery_page import write_gallery
from tests.reporting.plausible_run import BEGIN
from tests.reporting.two_runs import FIRST, SECOND, write_two_runs
from tests.support.clock import Clock


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_two_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def listed(*arguments: str) -> list[dict[str, Any]]:
    return list(json.loads(call("runs", "--json", *arguments)))


def reported(run_id: str) -> dict[str, Any]:
    return dict(json.loads(call("report", run_id, "--json")))


def test_the_newest_are_shown_against_the_one_before_also_where_that_is_not(project: Path) -> None:
    assert listed("--last", "1") == listed()[:1]


def test_on_a_narrow_terminal_names_and_changes_are_there(project: Path) -> None:
    done = CliRunner().invoke(app, ["runs"], env={"COLUMNS": "80"}, catch_exceptions=False)
    together = "".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80
    assert "changed" in together
    assert "ppo.updates" in together
    assert SECOND[:15] in together


def test_a_run_without_its_parameters_is_listed_with_the_reason(project: Path) -> None:
    (kept_folder(project, FIRST) / "params.yaml").unlink()
    newest, oldest = listed()
    assert (oldest["run_id"], oldest["usd"]) == (FIRST, None)
    assert "params.yaml" in oldest["note"]
    assert newest["changed"] == ""
    assert "params.yaml" in call("runs")


def test_before_the_first_run_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert listed() == []
    assert "rlhf run" in call("runs")


def test_a_run_that_is_not_there_is_refused_with_those_that_are(project: Path) -> None:
    with pytest.raises(UserError, match=FIRST):
        call("restore", "yesterday")


def test_a_run_that_failed_is_listed_with_its_reason(project: Path) -> None:
    failed = "20261124-120000-broken-kettle"
    kept_folder(project, failed).mkdir(parents=True)
    source = kept_folder(project, FIRST) / "params.yaml"
    shutil.copyfile(source, kept_folder(project, failed) / "params.yaml")
    clock = Clock(project, failed, BEGIN)
    clock.pipeline("start")
    clock.pipeline("end", state="failed", detail={"message": "planned above budget.max_usd=3"})
    newest = listed()[0]
    assert (newest["run_id"], newest["state"]) == (failed, "failed")
    assert newest["note"] == "planned above budget.max_usd=3"
    assert "planned above budget.max_usd=3" in call("runs")
    page = write_gallery(project).read_text()
    assert "planned above budget.max_usd=3; " in page
    assert page.count("failed") >= 1
