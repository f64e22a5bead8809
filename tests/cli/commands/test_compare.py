"""`rlhf compare` on the files of two runs: tables for people, JSON for programs, the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.reporting.two_runs import FIRST, SECOND, write_two_runs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_two_runs(tmp_path)
    return tmp_path


def call(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "compare", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "120"}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_last_two_runs_are_compared_by_default(project: Path) -> None:
    done = call(project, "--json")
    assert done.returncode == 0, done.stderr
    assert [run["name"] for run in json.loads(done.stdout)["variants"]] == [FIRST, SECOND]
    assert done.stdout == call(project, FIRST, "last", "--json").stdout
    assert [run["name"] for run in json.loads(call(project, "last", FIRST, "--json").stdout)["variants"]] == [
        SECOND,
        FIRST,
    ]


def test_the_page_is_written_to_the_file_and_its_path_printed(project: Path) -> None:
    done = call(project, FIRST, SECOND, "--html", "out/page.html")
    assert done.stdout.strip() == str(project / "out" / "page.html")
    assert (project / "out" / "page.html").stat().st_size > 20_000
    refused = call(project, "--html", "dvc.yaml/page.html")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_an_unknown_run_is_one_line_with_the_runs_there_are(project: Path) -> None:
    done = call(project, FIRST, "yesterday")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "'yesterday'" in done.stderr
    assert f"{SECOND}, {FIRST}" in done.stderr


def test_the_command_imports_neither_torch_nor_a_server(project: Path) -> None:
    heavy = "{'torch', 'prefect', 'mlflow', 'transformers', 'dvc', 'numpy'}"
    program = f"""
import sys
from cli.main import app
try:
    app(["compare", "--html", "x.html"])
except SystemExit:
    print(sorted({heavy} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
