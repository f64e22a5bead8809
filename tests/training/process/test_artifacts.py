import contextlib
import csv
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.errors import EnvironmentFault
from tests.support.forked import exit_code_of_fork
from tests.training.support.tiny import files, names, on_a_small_disk
from training.process.artifacts import replacing, restore, write_csv, write_json, write_jsonl
from training.process.faults import named_fault


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder that an earlier run left."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    return tmp_path / "out"


# ---------------------------------------------------------------- whole or not at all


def test_a_folder_is_replaced_whole(output: Path) -> None:
    with replacing(output) as folder:
        folder.mkdir()
        (folder / "new").write_text("new")
        assert files(output) == {"old": b"old"}
    assert files(output) == {"new": b"new"}
    assert names(output.parent) == ["out"]


def test_a_first_output_and_its_folders_are_made(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"accuracy": 0.5})
    assert (tmp_path / "a" / "b.json").read_text() == '{\n  "accuracy": 0.5\n}\n'
    assert names(tmp_path / "a") == ["b.json"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failure_leaves_the_previous_output_and_nothing_else(output: Path, error: BaseException) -> None:
    def fail() -> None:
        with replacing(output) as folder:
            folder.mkdir()
            (folder / "half").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert files(output.parent) == {"out/old": b"old"}


def test_metrics_that_are_no_json_numbers_leave_the_previous_file(tmp_path: Path) -> None:
    write_json(tmp_path / "m.json", {"loss": 1.0})
    with pytest.raises(ValueError, match="nan"):
        write_json(tmp_path / "m.json", {"loss": float("nan")})
    assert json.loads((tmp_path / "m.json").read_text()) == {"loss": 1.0}


def test_rows_and_tables_hold_what_they_were_given(tmp_path: Path) -> None:
    rows = [{"prompt": "größer\nals", "n": 1}, {"prompt": "", "n": None}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()] == rows
    write_csv(tmp_path / "table.csv", ("step", "loss"), [[1, 0.25], [2, ""]])
    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["1", "0.25"], ["2", ""]]


def write_and_die(output: Path, moment: int) -> None:
    """Replace an output, and be killed before the rename of that number, or while it is written."""
    rename, calls = Path.rename, itertools.count(1)

    def rename_or_die(path: Path, target: Path) -> Path:
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = rename_or_die  # type: ignore[assignment, method-assign]
    with replacing(output) as folder:
        folder.mkdir()
        (folder / "new").write_text("new")
        if moment == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", [0, 1, 2], ids=["while writing", "before the first rename", "between the renames"])
def test_kill_9_at_any_moment_leaves_the_old_or_the_new_output(output: Path, moment: int) -> None:
    died = exit_code_of_fork(lambda: write_and_die(output, moment))
    assert died == -signal.SIGKILL
    restore(output)
    assert files(output) == {"old": b"old"}
    with replacing(output) as folder:
        folder.mkdir()
        (folder / "newer").write_text("newer")
    assert files(output.parent) == {"out/newer": b"newer"}


def test_what_a_kill_left_of_the_previous_output_is_removed(output: Path) -> None:
    previous = output.with_name(".out.previous")
    output.rename(previous)
    output.mkdir()
    (output / "new").write_text("new")
    restore(output)
    assert files(output.parent) == {"out/new": b"new"}


# ---------------------------------------------------------------- faults of the place


def refused(error: pytest.ExceptionInfo[EnvironmentFault], target: Path, said: str) -> None:
    assert said in str(error.value)
    assert str(target) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_a_full_disk_leaves_the_previous_output(output: Path) -> None:
    def fill() -> None:
        with replacing(output) as target:
            target.symlink_to("/dev/full")
            target.write_text("x" * 100_000)

    with pytest.raises(EnvironmentFault) as error:
        fill()
    refused(error, output, "no space left on the disk")
    assert files(output.parent) == {"out/old": b"old"}


SAVERS = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from config.errors import EnvironmentFault
from training.process.artifacts import replacing, write_json
weights, place = torch.zeros(10**5), Path("weights")
write_json(place, {"old": True})
for write in (lambda path: save_file({"x": weights}, path), lambda path: torch.save(weights, path)):
    try:
        with replacing(place) as target:
            write(target)
    except EnvironmentFault as error:
        print(error)
    assert place.read_text().split() == ["{", '"old":', "true", "}"]
    assert [path.name for path in Path().iterdir()] == ["weights"]
"""


def test_a_full_disk_is_recognised_behind_the_errors_of_libraries(tmp_path: Path) -> None:
    said = on_a_small_disk(tmp_path, 256, [sys.executable, "-c", SAVERS])
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert len(lines) == 2
    assert all("no space left on the disk" in line for line in lines)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Neither this user nor root may write to the folder."""
    folder.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        folder.chmod(0o700)


def test_no_permission_leaves_the_previous_output(output: Path) -> None:
    with read_only(output.parent), pytest.raises(EnvironmentFault) as error, replacing(output) as folder:
        folder.mkdir()
    refused(error, output, "no permission to write")
    assert files(output.parent) == {"out/old": b"old"}


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    for error in (FileNotFoundError(2, "no such file"), RuntimeError("shape mismatch"), ValueError("os error")):
        assert named_fault(error, tmp_path) is error
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "out"):
        (tmp_path / "nowhere" / "x").write_text("")
