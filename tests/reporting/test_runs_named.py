from pathlib import Path

import pytest

from config.errors import UserError
from reporting.runs_named import SHOWN, known_runs, resolve
from tests.reporting.plausible_run import BEGIN
from tests.support.clock import Clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four runs; the first one's end is recorded after the second began."""
    for run_id in ("r1", "r2", "r3", "r4"):
        Clock(tmp_path, run_id, BEGIN).pipeline("start")
    Clock(tmp_path, "r1", BEGIN).pipeline("end", state="killed")
    return tmp_path


def test_runs_are_listed_newest_first(root: Path) -> None:
    assert known_runs(root) == ["r4", "r3", "r2", "r1"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["r1", "r3"], ["r1", "r3"]),
        (["last-1", "last"], ["r3", "r4"]),
        (["last", "last-3", "r2"], ["r4", "r1", "r2"]),
        ([], ["r3", "r4"]),
        (["r2"], ["r2", "r4"]),
        (["last"], ["r4", "r3"]),
    ],
)
def test_names_stand_for_runs(root: Path, names: list[str], expected: list[str]) -> None:
    assert resolve(root, names) == expected


def test_runs_that_completed_are_compared_by_default(root: Path) -> None:
    for run_id in ("r1", "r2"):
        Clock(root, run_id, BEGIN).pipeline("end", state="completed")
    assert resolve(root, []) == ["r1", "r2"]
    assert resolve(root, ["r4"]) == ["r4", "r2"]
    assert resolve(root, ["r2"]) == ["r2", "r1"]


def test_the_nickname_of_a_run_names_it(root: Path) -> None:
    for run_id in ("20261124-141953-hopeful-bear", "20261125-141953-hopeful-bear"):
        Clock(root, run_id, BEGIN).pipeline("start")
    assert resolve(root, ["hopeful-bear", "r1"]) == ["20261125-141953-hopeful-bear", "r1"]
    with pytest.raises(UserError, match="'bear' is not in"):
        resolve(root, ["bear", "r1"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["r1", "nope"], "run 'nope' is not in runs/pipeline.jsonl"),
        (["last-1", "../r1"], r"run '\.\./r1' is not"),
        (["last-4", "last"], "last-4 is not there: 4 runs"),
        (["r3", "last-1"], "name run r3 twice"),
    ],
)
def test_a_mistake_is_one_line_with_the_runs_there_are(root: Path, names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        resolve(root, names)
    assert "r4, r3, r2, r1" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_runs_it_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0 runs were recorded.*rlhf run"):
        resolve(tmp_path, [])


def test_of_many_runs_the_newest_are_listed(tmp_path: Path) -> None:
    for i in range(SHOWN + 3):
        Clock(tmp_path, f"run-{i:02}", BEGIN).pipeline("start")
    with pytest.raises(UserError, match=r"run-12, .*run-03 and 3 older ones"):
        resolve(tmp_path, ["x", "y"])
