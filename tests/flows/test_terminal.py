"""`rlhf run` in a terminal, on the project's own Prefect server; either goes away meanwhile."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest

from config import jsonl
from config.ports import free_port
from config.records import AttemptRow, PipelineRow, stages_of
from config.workspace.rows import pipeline_rows
from tasks.servers.flow_runs import is_run
from tasks.servers.plans import prefect_plan
from tasks.servers.processes import Server, start, stop
from tests.conftest import ROOT
from tests.flows.stack import environment
from tests.support.stage_project import make_project

PATIENCE_SECONDS = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    root = make_project(tmp_path / "project", tmp_path / "remote", stages_of("ppo"))
    shutil.copytree(ROOT / "recipes", root / "recipes")
    yield start(root, [prefect_plan(root, free_port())])[0]
    stop(root)


@contextmanager
def rlhf_run(root: Path, until: str, output: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """The running command, once its stage `until` has left a row. What it prints goes to a file, or to `output`, its
    terminal if that is one.
    """
    with (root.parent / "printed").open("w") as file:
        command = [sys.executable, "-m", "cli.main", "run", "--yes"]
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(),
            stdout=output or file,
            stderr=output or file,
            text=True,
            start_new_session=output is not None,
            preexec_fn=(lambda: ioctl(1, termios.TIOCSCTTY, 0)) if output and os.isatty(output) else None,
        )
        if output is not None:
            os.close(output)
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
    rows = pipeline_rows(root)
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
def test_down_lets_a_run_of_a_terminal_checkpoint_before_its_server_goes(tmp_path: Path, server: Server) -> None:
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


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("open_output", "ended"),
    [
        pytest.param(os.pipe, (0, "completed"), id="a pipe"),
        pytest.param(pty.openpty, (75, "stopped"), id="a terminal"),
    ],
)
def test_where_nobody_reads_any_more_a_run_ends_as_it_would_have_and_a_lost_terminal_stops_it(
    tmp_path: Path, server: Server, open_output: Callable[[], tuple[int, int]], ended: tuple[int, str]
) -> None:
    root = tmp_path / "project"
    (root / "behaviour.txt").write_text("slow")
    ours, output = open_output()
    with rlhf_run(root, "sft", output) as process:
        os.close(ours)
        (root / "behaviour.txt").unlink()
        code = process.wait(PATIENCE_SECONDS)
    assert (code, last_row(root).state) == ended


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
