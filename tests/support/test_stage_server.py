"""Whoever starts a stage cannot tell that a fork does its work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.stage_server import forked_stages

STAGE = """
import os, signal, sys, time
from pathlib import Path

print("said", os.getcwd(), os.environ["OF_TEST"], *sys.argv[1:], flush=True)
if "waits" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
if "raises" in sys.argv:
    raise ValueError("of the test")
sys.exit(3)
"""


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, str]]:
    with forked_stages(imported=()) as environment:
        yield {**os.environ, **environment, "OF_TEST": "yes"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a project whose package training has one stage."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").touch()
    (tmp_path / "training/x.py").write_text(STAGE)
    return tmp_path


def start(folder: Path, stages: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "training.x", *arguments],
        cwd=folder,
        env=stages,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("how", "code"), [("ends", 3), ("raises", 1)])
def test_exit_code_output_folder_and_environment_are_those_of_the_stage(
    folder: Path, stages: dict[str, str], how: str, code: int
) -> None:
    with start(folder, stages, how) as process:
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, f"said {folder} yes {how}\n")
    assert ("ValueError: of the test" in error) is (how == "raises")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_reaches_the_stage_and_a_kill_ends_it(
    folder: Path, stages: dict[str, str], number: signal.Signals, code: int
) -> None:
    with start(folder, stages, "waits") as process:
        stage = psutil.Process(pid_of(folder))
        assert stage.pid != process.pid
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    stage.wait(timeout=60)


def test_a_stage_that_is_killed_ends_who_stands_for_it(folder: Path, stages: dict[str, str]) -> None:
    with start(folder, stages, "waits") as process:
        os.kill(pid_of(folder), signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def pid_of(folder: Path) -> int:
    path, deadline = folder / "pid", time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())
