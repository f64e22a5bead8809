import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from config import jsonl
from config.load import load, write
from config.records import PipelineRow
from config.workspace.at_work import locked
from tests.conftest import ROOT

HEAVY = {"torch", "prefect", "mlflow", "dvc", "transformers", "matplotlib", "pandas"}


def rlhf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_names_the_commit_and_in_an_image_that_it_was_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    monkeypatch.setenv("RLHF_COMMIT", "0123456789abcdef")
    said = rlhf("--version").stdout.strip()
    assert said == f"rlhf-ledger {version('rlhf-ledger')}, commit {head[:12] or '0123456789ab'}"
    monkeypatch.setenv("PATH", "")
    assert rlhf("--version").stdout.strip().endswith(", commit 0123456789ab")


def test_the_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY} & {{name.split('.')[0] for name in sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert all(f" {command} " in done.stdout for command in ("run", "report", "up", "down", "status", "doctor"))


@pytest.mark.parametrize(("arguments", "code"), [(["plan", "--json"], 0), (["plan", "--recipe", "nothing.yaml"], 2)])
def test_a_command_whose_output_nobody_reads_ends_as_it_would_have(arguments: list[str], code: int) -> None:
    for name in ("stdout", "stderr"):
        ours, output = os.pipe()
        os.close(ours)
        with os.fdopen(output, "w") as unread:
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: unread}
            command = [sys.executable, "-m", "cli.main", *arguments]
            assert subprocess.run(command, cwd=ROOT, check=False, **streams).returncode == code


def test_an_output_that_cannot_be_written_is_no_unread_one() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "cli.main", "plan", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--recipe", "recipes/nothing.yaml"], "recipes/nothing.yaml does not exist"),
        (["run", "--set", "ppo.learning_rte=1e-5"], "did you mean learning_rate?"),
        (["run", "--set", "ppo.num_mini_batches=7"], "ppo.num_mini_batches=7"),
        (["up", "--open", "grafana"], "it is prefect or mlflow"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = rlhf(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_command_outside_of_a_project_says_where_to_go(tmp_path: Path) -> None:
    done = rlhf("status", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "dvc.yaml" in done.stderr


def test_a_refused_run_leaves_params_yaml_alone(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    write(load(ROOT / "recipes" / "demo.yaml"), tmp_path / "params.yaml")
    before = (tmp_path / "params.yaml").read_text()
    assert rlhf("run", "--set", "sft.epochs=-1", cwd=tmp_path).returncode == 2
    assert (tmp_path / "params.yaml").read_text() == before
    assert not (tmp_path / "runs").exists()


def test_status_tells_a_run_at_work_from_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    jsonl.append(tmp_path / "runs" / "pipeline.jsonl", PipelineRow(time=0.0, run_id="a", event="start"))
    with locked(tmp_path):
        assert json.loads(rlhf("status", "--json", cwd=tmp_path).stdout)["run"] == {"run_id": "a", "state": "running"}
    assert json.loads(rlhf("status", "--json", cwd=tmp_path).stdout)["run"] == {"run_id": "a", "state": "killed"}


def test_status_of_a_fresh_checkout(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    done = rlhf("status", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"servers": [], "run": None}
    assert rlhf("down", cwd=tmp_path).returncode == 0


def test_the_help_imports_nothing_heavy() -> None:
    program = "import sys, cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    heavy = {"dvc", "mlflow", "numpy", "prefect", "torch", "transformers"}
    assert heavy & set(done.stdout.split()) == set()
