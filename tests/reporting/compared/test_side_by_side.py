"""Runs side by side, on the files that two runs leave."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from config.errors import UserError
from reporting.compared.inputs import read_side_by_side
from reporting.compared.page import side_by_side_page
from reporting.compared.side_by_side import (
    ABSENT_PARAM,
    Estimate,
    as_dict,
    difference,
    is_clear,
    param_differences,
)
from tests.reporting.plausible_run import BEGIN
from tests.reporting.two_runs import FIRST, FIRST_DATA, SECOND, write_two_runs
from tests.support.clock import Clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_two_runs(tmp_path)
    return tmp_path


def found(root: Path, *runs: str) -> dict[str, Any]:
    return as_dict(read_side_by_side(root, runs or (FIRST, SECOND)))


def test_the_interval_of_a_difference_is_the_published_one() -> None:
    """Newcombe 1998, table II, method 10, 56/70 - 48/80: 0.0524 to 0.3339, from the Wilson
    intervals of the two shares.
    """
    less, more = Estimate(0.6, 0.49043, 0.70035), Estimate(0.8, 0.69173, 0.87691)
    d = difference(less, more)
    assert d.low is not None
    assert d.high is not None
    assert (round(d.value, 4), round(d.low, 4), round(d.high, 4)) == (0.2, 0.0524, 0.3339)
    assert is_clear(d) is True
    assert difference(more, less) == Estimate(
        pytest.approx(-0.2), pytest.approx(-d.high), pytest.approx(-d.low)
    )


def test_without_an_interval_nothing_is_called_clear() -> None:
    assert difference(Estimate(1.0), Estimate(3.0, 2.0, 4.0)) == Estimate(2.0)
    assert is_clear(Estimate(2.0)) is None
    assert is_clear(Estimate(0.1, -0.1, 0.3)) is False


def test_a_section_that_only_one_run_has_is_told_key_by_key() -> None:
    differences = list(
        param_differences([{"lora": None, "a": 1}, {"lora": {"rank": 8, "alpha": 16}, "a": 1}])
    )
    assert [(row.key, row.values) for row in differences] == [
        ("lora", (None, ABSENT_PARAM)),
        ("lora.rank", (ABSENT_PARAM, 8)),
        ("lora.alpha", (ABSENT_PARAM, 16)),
    ]


def test_rows_that_came_and_went_are_counted_per_split(root: Path) -> None:
    rows = {(row["dataset"], row["split"]): row for row in found(root)["data"]}
    assert len(rows) == 6
    assert (rows["preference", "train"]["added"], rows["preference", "train"]["removed"]) == (
        [30],
        [10],
    )
    assert (rows["preference", "test"]["added"], rows["preference", "test"]["removed"]) == (
        [0],
        [0],
    )
    assert rows["sft", "train"]["rows"] == [9612, 9612]


def test_rows_of_a_version_that_was_not_kept_are_not_known(root: Path) -> None:
    (root / "runs/data/rows" / f"{FIRST_DATA.removesuffix('.dir')}.json").unlink()
    content = found(root)
    assert all(row["added"] == [None] for row in content["data"])
    assert any("not known" in note for note in content["notes"])


def test_intervals_of_another_level_are_not_put_together(root: Path) -> None:
    path = root / "runs/pipeline" / SECOND / "params.yaml"
    path.write_text(path.read_text().replace("confidence: 0.95", "confidence: 0.9"))
    win = next(row for row in found(root)["metrics"] if row["metric"] == "win_rate_gold")
    assert (win["differences"][0]["value"], win["differences"][0]["low"]) == (
        pytest.approx(0.075),
        None,
    )


def test_a_third_run_that_failed_early_is_beside_them(root: Path) -> None:
    clock = Clock(root, "third", BEGIN + 7200)
    folder = root / "runs/pipeline/third"
    folder.mkdir()
    shutil.copy(root / "runs/pipeline" / SECOND / "params.yaml", folder)
    clock.pipeline("start")
    clock.attempt("sft", 2, "start")
    clock.use("sft", 2, "start", 0, 5.0)
    clock.attempt("sft", 2, "end", exit_code=1, message="it burst")
    clock.pipeline("end", state="failed")
    content = found(root, FIRST, SECOND, "third")
    assert [run["state"] for run in content["runs"]] == ["completed", "completed", "failed"]
    assert len(content["costs"]) == 2
    assert all(row["values"][2] is None for row in content["metrics"])
    assert content["data"][0]["added"] == [0, None]
    assert any("third" in note for note in content["notes"])
    assert "third" in side_by_side_page(read_side_by_side(root, (FIRST, SECOND, "third")))


def test_other_judges_are_noted(root: Path) -> None:
    assert found(root)["notes"] == []
    Clock(root, SECOND, BEGIN).pipeline(
        "stage", stage="reward", cached=True, attempt=1, detail={"outs": {"models/reward": "other"}}
    )
    assert any("different reward models" in note for note in found(root)["notes"])


def test_a_run_whose_params_are_gone_is_named(root: Path) -> None:
    (root / "runs/pipeline" / FIRST / "params.yaml").unlink()
    with pytest.raises(UserError, match=f"run {FIRST} cannot be compared"):
        found(root)


def test_the_json_is_json(root: Path) -> None:
    content = json.loads(json.dumps(found(root), allow_nan=False))
    assert list(content) == ["runs", "params", "data", "metrics", "costs", "samples", "notes"]


def test_the_page_is_self_contained_and_escapes_what_models_wrote(root: Path) -> None:
    page = side_by_side_page(read_side_by_side(root, (FIRST, SECOND)))
    assert "thank you &lt;b&gt;&amp; bye&lt;/b&gt;" in page
    assert "<b>& bye" not in page
    assert not any(mark in page for mark in ("<script", "http://", "https://", " src=", "@import"))
    assert all(
        f'id="{anchor}"' in page for anchor in ("metrics", "costs", "samples", "params", "data")
    )
    assert page == side_by_side_page(read_side_by_side(root, (FIRST, SECOND)))
