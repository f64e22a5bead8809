"""`rlhf report` on the files of a run: JSON for programs, a table for people, the page."""

import json
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.commands.report import report
from config.errors import EnvironmentFault, ParamsError, UserError
from config.load import load, write
from reporting.numbers import usd
from tests.reporting.plausible_run import write_cached_run, write_pipeline_run

ROOT = Path(__file__).parents[3]
FIRST = "20261121-120000-a1b2"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder after one run."""
    (tmp_path / "config").mkdir()
    for mark in ("dvc.yaml", "config/schema.py"):
        (tmp_path / mark).touch()
    write(load(ROOT / "recipes" / "demo.yaml"), tmp_path / "params.yaml")
    write_pipeline_run(tmp_path, FIRST)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def printed(*arguments: str) -> dict[str, Any]:
    result = call("--json", *arguments)
    assert result.exit_code == 0
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_the_newest_run_is_reported_and_an_older_one_by_name(project: Path) -> None:
    write_cached_run(project)
    newest, first = printed(), printed(FIRST)
    assert [stage["cached"] for stage in newest["stages"]] == [True] * 5
    assert newest["total_usd"] == 0
    assert first["total_usd"] > 0
    assert newest["saved_usd"] == pytest.approx(first["total_usd"] - first["waste_usd"])


def test_html_is_written_and_its_path_printed(project: Path) -> None:
    result = call("--html")
    assert result.stdout.strip() == str(project / "report" / "report.html")
    assert (project / "report" / "report.html").stat().st_size > 100_000


def test_outside_of_a_project_it_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    assert isinstance(call("--json").exception, EnvironmentFault)


def test_mistakes_are_errors_of_the_user(project: Path) -> None:
    assert isinstance(call("no-such-run").exception, UserError)
    assert isinstance(call("--set", "prices.usd_per_device_hours=1").exception, ParamsError)


def test_rows_are_shipped_to_mlflow_on_demand(project: Path) -> None:
    url = f"sqlite:///{project / 'mlflow.db'}"
    command = [
        sys.executable,
        "-c",
        "import typer; from cli.commands.report import report; typer.run(report)",
        "--sync",
        "--set",
        f"tracking.uri={url}",
    ]
    done = subprocess.run(
        command,
        cwd=project,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 1000
    assert (project / "mlflow.db").stat().st_size > 0


def test_the_command_imports_neither_torch_nor_a_server() -> None:
    heavy = "{'torch', 'prefect', 'mlflow', 'matplotlib', 'transformers'}"
    program = (
        f"import sys, cli.commands.report, reporting.build, costs.ledger.ledger; "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_of_all_runs_is_written_and_takes_no_other_option(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    done = call("--all")
    assert (done.exit_code, opened) == (0, [])
    page = Path(done.stdout.strip())
    assert FIRST in page.read_text()
    assert call("--all", "--open").exit_code == 0
    assert opened == [page.as_uri()]
    for arguments, name in ((["--json"], "--json"), (["--set", "seed=2"], "--set")):
        refused = call("--all", *arguments).exception
        assert isinstance(refused, UserError)
        assert str(refused).startswith(f"{name} does nothing beside --all")
    assert isinstance(call(FIRST, "--all").exception, UserError)


def test_a_card_is_ten_lines_that_say_what_it_took_and_how_to_repeat_it(project: Path) -> None:
    costs = printed(FIRST)
    result = call("--card", FIRST)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"**{FIRST}**: ")
    rows = {name.strip(): words.strip() for _, name, words, _ in (line.split("|") for line in lines[4:])}
    assert list(rows) == ["model", "data", "method", "hardware", "cost", "waste", "gain", "repeat"]
    assert rows["method"] == "ppo, seed 1"
    for stage in costs["stages"]:
        assert stage["stage"] in rows["cost"]
    assert rows["cost"].startswith(usd(costs["total_usd"]))
    assert rows["waste"].startswith(usd(costs["waste_usd"]))
    assert "comparisons with SFT by gold" in rows["gain"]
    assert rows["repeat"] == f"`rlhf run --recipe runs/pipeline/{FIRST}/params.yaml`"
