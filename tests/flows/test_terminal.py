"""`rlhf run` in a terminal, on the project's own Prefect server, which goes away meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config import jsonl
from config.records import AttemptRow, PipelineRow, stages_of
from tasks.servers.flow_runs import is_run
from tasks.servers.plans import prefect_plan
from tasks.servers.processes import Server, start, stop
from tests.conftest import ROOT
from tests.flows.stack import environment
from tests.support.ports import free_port
from tests.support.stage_project import make_project

PATIENCE_SECONDS = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    root = make_project(tmp_path / "project", tmp_path / "remote", stages_of("ppo"))
    shutil.copytree(ROOT / "recipes", root / "recipes")
    yield start(root, [prefect_plan(root, free_port())])[0]
    stop(root)


@contextmanager
def rlhf_run(root: Path, until: str) -> Iterator[subprocess.Popen[str]]:
    """The command at work, once its stage `until` has left a row."""
    with (root.parent / "printed").open("w") as file:
        command = [sys.executable, "-m", "cli.main", "run", "--yes"]
        process = subprocess.Popen(
            command, cwd=root, env=environment(), stdout=file, stderr=file, text=True
        )
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (root / "runs" / until / "usage.jsonl").exists():
                assert process.poll() is None, (root.parent / "printed").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()
            process.wait()


def last_row(root: Path) -> PipelineRow:
    rows: list[PipelineRow] = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    return rows[-1]


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_completes_whatever_becomes_of_the_server(tmp_path: Path, server: Server) -> None:
    root = tmp_path / "project"
    with rlhf_run(root, "evaluate") as process:
        os.killpg(server.pid, signal.SIGKILL)
        code = process.wait(PATIENCE_SECONDS)
    printed = (tmp_path / "printed").read_text()
    assert (code, last_row(root).event, last_row(root).state) == (0, "end", "completed"), printed
    assert "Traceback" not in printed
    assert "the Prefect server is gone" in printed
    assert time.time() - last_row(root).time < 100.0, "Prefect's own retries take 280 s"


@pytest.mark.slow
@pytest.mark.integration
def test_down_lets_a_run_of_a_terminal_checkpoint_before_its_server_goes(
    tmp_path: Path, server: Server
) -> None:
    root = tmp_path / "project"
    (root / "behaviour.txt").write_text("slow")
    with rlhf_run(root, "data") as process:
        # in another process: waiting here would reap the run's exit code
        down = [sys.executable, "-m", "cli.main", "down"]
        subprocess.run(down, cwd=root, env=environment(), check=True, timeout=PATIENCE_SECONDS)
        code = process.wait(PATIENCE_SECONDS)
    printed = (tmp_path / "printed").read_text()
    assert (code, last_row(root).state) == (75, "stopped"), printed
    assert "Traceback" not in printed
    rows = jsonl.read(root / "runs" / "data" / "attempts.jsonl", AttemptRow).rows
    assert [row.exit_code for row in rows if row.event == "end"] == [75]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "-m", "prefect.engine"], True),
        ([".venv/bin/python", ".venv/bin/rlhf", "run", "--yes"], True),
        (["python", "-m", "cli.main", "retrain"], True),
        ([".venv/bin/python", ".venv/bin/rlhf", "down"], False),
        (["vim", "rlhf", "notes"], False),
        (["tail", "-f", "run"], False),
    ],
)
def test_the_command_line_of_a_run_is_known(command: list[str], found: bool) -> None:
    assert is_run(command) is found
