"""What `rlhf run` says and asks before anything starts."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from config.records import stages_of
from tests.conftest import ROOT
from tests.support.stage_project import make_project
from tests.tasks.planning.test_plan import depend_on_code, stopped_in_sft

STAGES = stages_of("ppo")

pytestmark = pytest.mark.integration

ASK = (
    "from pathlib import Path\nfrom cli.flow_run import plan_first\nfrom config.load import load\n"
    "plan_first(Path(), load(Path('params.yaml'), ['budget.approval_usd=0.001']), "
    "False)\nprint('started')"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", tmp_path / "remote", STAGES)


def rlhf(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("budget.max_usd=0.0001", "The fixed cost alone is"),
        ("budget.max_hours=0.02", "budget.max_hours=0.02 does not allow it"),
        ("budget.approval_usd=0.001", "stdin is not a terminal. Approve with --yes"),
    ],
)
def test_a_run_that_may_not_start_is_one_line_after_its_plan_and_leaves_everything_alone(
    project: Path, change: str, words: str
) -> None:
    before = sorted(path.name for path in project.iterdir())
    params = (project / "params.yaml").read_bytes()
    done = rlhf(project, "run", "--set", change)
    assert (done.returncode, done.stdout) == (2, "")
    plan, refusal = done.stderr.strip().splitlines()
    assert plan.startswith("Planned: ")
    assert words in refusal
    assert sorted(path.name for path in project.iterdir() if path.name != ".dvc") == [
        name for name in before if name != ".dvc"
    ]
    assert (project / "params.yaml").read_bytes() == params


@pytest.mark.parametrize(
    ("answer", "code", "said"), [("y", 0, "started"), ("n", 1, "not approved"), ("", 1, "not approved")]
)
def test_on_a_terminal_approval_is_asked_for(project: Path, answer: str, code: int, said: str) -> None:
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            cwd=project,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == code
    assert "Start the run? [y/N]" in done.stderr
    assert said in done.stdout + done.stderr


ASK_ABOUT_CODE = (
    "import os\nfrom pathlib import Path\nfrom cli.flow_run import plan_first\nfrom config.load "
    "import load\n"
    "plan_first(Path(), load(Path('params.yaml'), ['prices.usd_per_device_hour=3.6']), "
    "False)\nprint(os.environ['RLHF_CHANGED_CODE'])"
)


@pytest.mark.parametrize(
    ("answer", "code", "said"), [("c", 0, "continue"), ("restart", 0, "restart"), ("", 1, "Nothing was started")]
)
def test_on_a_terminal_it_is_asked_what_to_do_with_a_checkpoint_of_other_code(
    project: Path, answer: str, code: int, said: str
) -> None:
    stopped_in_sft(project, 100.0)
    depend_on_code(project)
    keyboard, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "RLHF_CHANGED_CODE"}
    try:
        os.write(keyboard, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-c", ASK_ABOUT_CODE],
            cwd=project,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == code
    assert "sft: other code made the checkpoint after step 150: stage.py changed since." in done.stderr
    assert "Starting over costs 1 min 40 s and $0.10 again" in done.stderr
    assert said in done.stdout + done.stderr
