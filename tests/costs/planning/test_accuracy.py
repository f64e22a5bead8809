"""The planner's error over past runs: the interval, and when a correction is used."""

import json
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.main import app
from config.records import PlannedRow
from costs.ledger.history import HISTORY, this_machine
from costs.planning.accuracy import NEWEST_RUNS, correction, ratios, spread, with_errors
from costs.planning.plans import Plan
from costs.planning.stages import plan_stage
from costs.tables.catalogue import price
from tests.costs.settings import sft


def test_a_plan_that_is_always_a_third_short_is_corrected() -> None:
    assert correction([1.5, 1.52, 1.48]) == pytest.approx((1.5 * 1.52 * 1.48) ** (1 / 3))


def test_scatter_around_the_plan_is_not_corrected() -> None:
    # the mean is 1.1, but predicting each from the others does worse than the plan does
    assert correction([1.0, 1.0, 1.331]) == 1.0


def test_one_outlier_does_not_correct_the_others() -> None:
    assert correction([1.0, 1.0, 1.0, 1.0, 3.0]) == 1.0


def test_runs_that_no_factor_corrects_show_a_spread_around_the_plan() -> None:
    result = spread([2.0, 0.5, 2.0])
    assert result is not None
    assert result.expected == 1.0
    assert result.high == pytest.approx(exp(log(2) * 1.638))
    assert result.low == pytest.approx(1 / result.high)


def test_two_runs_say_nothing_about_the_spread() -> None:
    assert spread([1.1]) is None
    assert spread([1.1, 1.2]) is None


def test_the_interval_of_a_fitted_mean_is_that_of_students_t() -> None:
    result = spread([exp(0.3), exp(0.4), exp(0.5)])
    assert result is not None
    assert log(result.expected) == pytest.approx(0.4)
    assert log(result.high) == pytest.approx(0.4 + 0.1 * (4 / 3) ** 0.5 * 1.886)
    assert result.error == pytest.approx(0.4)


@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=20))
def test_the_expectation_lies_within_the_interval_and_a_correction_lowered_the_error(found: list[float]) -> None:
    result = spread(found)
    assert result is not None
    assert result.low <= result.expected <= result.high
    if result.corrected:
        logs = [log(ratio) for ratio in found]
        left_out = [abs(x - (sum(logs) - x) / (len(logs) - 1)) for x in logs]
        assert sum(left_out) < sum(map(abs, logs))


def test_what_took_no_time_and_what_is_old_does_not_count() -> None:
    assert ratios([(0.0, 1.0), (1.0, 0.0), (2.0, 3.0)]) == [1.5]
    assert len(ratios([(1.0, 1.0)] * 30)) == 20


def past(
    stage: str = "sft", hardware: str = "a100-80", phase: str = "", seconds: float = 1.2, peak: float = 0.0
) -> PlannedRow:
    return PlannedRow(
        time=1.0,
        run_id="r1",
        machine=this_machine(),
        stage=stage,
        hardware=hardware,
        phase=phase,
        planned_seconds=1.0,
        measured_seconds=seconds,
        planned_peak_bytes=1.0 if peak else 0.0,
        measured_peak_bytes=peak,
    )


def planned(recipe: Path) -> dict[str, Any]:
    """What `rlhf plan` says of the stage ppo on one device."""
    options = ["--recipe", str(recipe), "--stage", "ppo", "--gpus", "1", "--json"]
    done = CliRunner().invoke(app, ["plan", *options], catch_exceptions=False)
    return dict(json.loads(done.stdout))


def test_the_plan_command_shows_what_past_runs_make_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path("recipes/demo.yaml").absolute()
    monkeypatch.chdir(tmp_path)
    (tmp_path / HISTORY).parent.mkdir()
    rows = [past(hardware="cpu", stage="ppo", seconds=seconds) for seconds in (1.5, 1.6, 1.7)]
    (tmp_path / HISTORY).write_text("".join(row.model_dump_json() + "\n" for row in rows))
    stage = planned(recipe)["stages"][0]
    band = stage["error"]["seconds"]
    assert band["corrected"]
    assert band["expected"] == pytest.approx((1.5 * 1.6 * 1.7) ** (1 / 3) * stage["seconds"])
    assert stage["error"]["peak_bytes"] is None


def test_the_plan_command_tells_a_row_of_the_history_that_a_crash_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path("recipes/demo.yaml").absolute()
    monkeypatch.chdir(tmp_path)
    (tmp_path / HISTORY).parent.mkdir()
    row = past(hardware="cpu", stage="ppo").model_dump_json() + "\n"

    def notes_and_runs() -> tuple[list[str], int]:
        content = planned(recipe)
        return [note for note in content["assumptions"] if str(HISTORY) in note], content["stages"][0]["error"][
            "seconds"
        ]["runs"]

    (tmp_path / HISTORY).write_text(3 * row)
    assert notes_and_runs() == ([], 3)
    (tmp_path / HISTORY).write_text(row + row[:40] + "\n" + row + row)
    notes, runs = notes_and_runs()
    assert (len(notes), runs) == (1, 3)
    assert notes[0].startswith("1 row of ")


def test_a_plan_takes_the_runs_of_its_own_stage_and_device() -> None:
    plan = Plan((plan_stage(sft(), price("a100-80")),))
    matching = [past(seconds=1.2), past(seconds=1.2), past(seconds=1.2)]
    others = [past(stage="ppo", seconds=9.0), past(hardware="h100", seconds=9.0), past(phase="train", seconds=9.0)] * 3
    stage = with_errors(plan, matching + others).stages[0]
    assert stage.error.seconds is not None
    assert stage.error.seconds.expected == pytest.approx(1.2 * stage.seconds)
    assert stage.error.seconds.runs == 3
    assert stage.error.peak_bytes is None
    # the plan itself stays: the next run's error is measured against it
    assert stage.seconds == plan.stages[0].seconds


def test_only_the_newest_runs_count() -> None:
    pairs = [(1.0, 9.0)] * 5 + [(2.0, 3.0)] * NEWEST_RUNS
    assert ratios(pairs) == [1.5] * NEWEST_RUNS
    assert ratios([(0.0, 1.0), (1.0, 0.0), (4.0, 2.0)]) == [0.5]
