"""What a killed DVC leaves in its table of locks keeps nobody from the project's files."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.dvc.status import StageAtWork, is_unchanged
from tests.support.stage_project import make_project


@pytest.fixture
def table(tmp_path: Path) -> Path:
    make_project(tmp_path / "project", tmp_path / "remote", ["sft"])
    path = tmp_path / "project/.dvc/tmp/rwlock"
    path.parent.mkdir(exist_ok=True)
    return path


@pytest.fixture
def not_waited_for() -> Iterator[int]:
    """Id of a process that has ended, and stays in the system's table."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def holder(pid: int) -> dict[str, object]:
    return {"pid": pid, "cmd": "dvc repro"}


def test_processes_that_are_gone_hold_nothing(
    tmp_path: Path, table: Path, not_waited_for: int
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (here, there), dead = (str(tmp_path / name) for name in ("here", "there")), holder(gone.pid)
    sft = str(tmp_path / "project" / "sft.out")
    written = {sft: holder(not_waited_for), here: dead}
    read = {here: [holder(os.getpid()), dead], there: [dead, holder(not_waited_for)]}
    table.write_text(json.dumps({"write": written, "read": read}))
    assert not is_unchanged(tmp_path / "project", "sft")
    assert json.loads(table.read_text()) == {"write": {}, "read": {here: [holder(os.getpid())]}}


def test_a_process_that_lives_keeps_what_it_writes(tmp_path: Path, table: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    content = {"write": {str(tmp_path / "project" / "sft.out"): holder(other.pid)}, "read": {}}
    table.write_text(json.dumps(content))
    try:
        with pytest.raises(StageAtWork):
            is_unchanged(tmp_path / "project", "sft")
        assert json.loads(table.read_text()) == content
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("left", ["", '{"write": {}, "read": {"/a'])
def test_half_of_a_table_is_none(tmp_path: Path, table: Path, left: str) -> None:
    table.write_text(left)
    assert not is_unchanged(tmp_path / "project", "sft")
