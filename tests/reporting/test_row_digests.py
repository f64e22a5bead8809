from pathlib import Path

import pytest

from reporting.row_digests import (
    Change,
    data_version,
    keep_row_digests,
    read_row_digests,
    reward_version,
    row_change,
)
from tests.reporting.plausible_run import BEGIN
from tests.reporting.two_runs import write_rows
from tests.support.clock import Clock


def test_rows_that_came_went_and_were_edited_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path, "sft", "train", range(50))
    write_rows(tmp_path, "sft", "test", range(50, 60))
    keep_row_digests(tmp_path, "aa.dir")
    write_rows(tmp_path, "sft", "train", range(5, 57))
    path = tmp_path / "data/prepared/sft/train.jsonl"
    path.write_text(path.read_text().replace('"question 9"', '"question nine"'))
    keep_row_digests(tmp_path, "bb.dir")
    before, after = read_row_digests(tmp_path, "aa.dir"), read_row_digests(tmp_path, "bb.dir")
    assert before is not None
    assert after is not None
    assert row_change(before, after, "sft/train") == Change(added=8, removed=6)
    assert row_change(before, after, "sft/test") == Change(0, 0)
    assert row_change(before, after, "prompts/train") == Change(0, 0)


def test_rows_in_another_order_are_the_same_rows(tmp_path: Path) -> None:
    for version, numbers in (("aa", range(20)), ("bb", range(19, -1, -1))):
        write_rows(tmp_path, "sft", "train", numbers)
        keep_row_digests(tmp_path, version)
    assert read_row_digests(tmp_path, "aa") == read_row_digests(tmp_path, "bb")


def test_a_version_is_written_once(tmp_path: Path) -> None:
    write_rows(tmp_path, "sft", "train", range(3))
    keep_row_digests(tmp_path, "aa")
    write_rows(tmp_path, "sft", "train", range(9))
    keep_row_digests(tmp_path, "aa")
    found = read_row_digests(tmp_path, "aa")
    assert found is not None
    assert len(found["sft/train"]) == 3
    assert [path.name for path in (tmp_path / "runs/data/rows").iterdir()] == ["aa.json"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b'{"sft/train": 3}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    assert read_row_digests(tmp_path, "aa") is None
    path = tmp_path / "runs/data/rows/aa.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert read_row_digests(tmp_path, "aa") is None
    assert read_row_digests(tmp_path, None) is None


def test_versions_are_those_that_the_run_recorded(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "r1", BEGIN)
    clock.pipeline("start")
    clock.pipeline("stage", stage="data", detail={"outs": {"data/prepared": "old"}})
    Clock(tmp_path, "r2", BEGIN).pipeline(
        "stage", stage="data", detail={"outs": {"data/prepared": "other"}}
    )
    clock.pipeline("stage", stage="reward", detail={"outs": {"models/reward": "judge"}})
    assert (data_version(tmp_path, "r1"), reward_version(tmp_path, "r1")) == ("old", "judge")
    assert (data_version(tmp_path, "r2"), reward_version(tmp_path, "r2")) == ("other", None)
