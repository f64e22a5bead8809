import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from config import jsonl
from config.load import load, write
from config.records import PipelineRow
from config.workspace.project import STUDIES, project_of, workspaces_of
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from tasks.run.purse import PLURALS, PURPOSE, Month, month, month_of, refusal, run_usd
from tests.conftest import ROOT
from tests.support.clock import Clock

PARAMS = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=360", "retrain.monthly_usd=50"])


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def a_run(root: Path, run_id: str, began: float, usd: float, retrain: bool = True) -> None:
    """A pipeline run of one attempt; at 360 dollars an hour ten seconds cost one."""
    clock, number = Clock(root, run_id, began), int(began)
    clock.pipeline("start", detail={PURPOSE: "some-flow-run"} if retrain else {})
    clock.attempt("sft", number, "start")
    clock.use("sft", number, "train", 0, 10 * usd)
    clock.attempt("sft", number, "end", exit_code=0)
    (root / "runs" / "pipeline" / run_id).mkdir(parents=True)
    write(PARAMS, root / "runs" / "pipeline" / run_id / "params.yaml")


def test_all_cycles_of_the_month_count_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path, "last-month", at("2026-10-31 23:59:59"), 7)
    a_run(tmp_path, "first", at("2026-11-01 00:00:01"), 10)
    a_run(tmp_path, "by-hand", at("2026-11-05"), 100, retrain=False)
    a_run(tmp_path, "second", at("2026-11-29"), 20)
    for when, usd in (("2026-10-31", 1.0), ("2026-11-02", 2.0)):
        jsonl.append(tmp_path / RETRAIN_ROWS, RetrainRow(time=at(when), cycle="c", event="cost", usd=usd))
    result = month(tmp_path, PARAMS, at("2026-11-30"))
    assert (result.name, result.limit_usd) == ("2026-11", 50)
    assert result.spent_usd == pytest.approx(32)
    assert result.left_usd == pytest.approx(18)
    every = month(tmp_path, PARAMS, at("2026-11-30"), every_run=True)
    assert every.spent_usd == pytest.approx(132)
    assert every.limit_usd is None  # budget.monthly_usd, of all runs


def test_a_new_month_begins_with_all_its_money(tmp_path: Path) -> None:
    a_run(tmp_path, "second", at("2026-11-29"), 20)
    assert month(tmp_path, PARAMS, at("2026-12-01 00:00:00")).spent_usd == 0


def test_money_spent_before_the_clock_was_put_back_is_spent(tmp_path: Path) -> None:
    a_run(tmp_path, "from-the-future", at("2026-12-01 00:30"), 20)
    assert month(tmp_path, PARAMS, at("2026-11-30 23:45")).spent_usd == pytest.approx(20)


def test_summer_time_and_time_zones_move_no_run_into_another_month(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [
        at("2026-03-29 00:59:59"),
        at("2026-03-29 01:00:01"),
        at("2026-10-25 00:30"),
        at("2026-10-31 23:30"),
        at("2026-11-01 00:30"),
    ]
    names = []
    for zone in ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Auckland"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        names.append([month_of(moment) for moment in moments])
    monkeypatch.undo()
    time.tzset()
    assert names == [["2026-03", "2026-03", "2026-10", "2026-10", "2026-11"]] * 4


def test_a_run_leaves_what_its_cycle_has_put_aside_for_the_contest(tmp_path: Path) -> None:
    def record(cycle: str, event: str, usd: float = 0.0) -> None:
        row = {"time": at("2026-11-02"), "cycle": cycle, "event": event, "usd": usd}
        jsonl.append(tmp_path / RETRAIN_ROWS, RetrainRow.model_validate(row))

    def left() -> float | None:
        return month(tmp_path, PARAMS, at("2026-11-03")).left_usd

    record("killed", "reserved", 40.0)
    record("c", "begin")
    record("c", "cost", 1.0)
    assert left() == pytest.approx(49)
    record("c", "reserved", 5.0)
    assert left() == pytest.approx(44)
    record("c", "cost", 6.0)  # the contest itself
    assert left() == pytest.approx(43)
    record("d", "reserved", 5.0)
    record("d", "end")
    assert left() == pytest.approx(43)


def test_without_a_limit_nothing_is_left_to_count(tmp_path: Path) -> None:
    unlimited = PARAMS.model_copy(update={"retrain": PARAMS.retrain.model_copy(update={"monthly_usd": None})})
    assert month(tmp_path, unlimited, at("2026-11-30")).left_usd is None


def test_the_newest_cycles_own_reserve_counts(tmp_path: Path) -> None:
    def record(cycle: str, event: str, usd: float = 0.0) -> None:
        row = {"time": at("2026-11-02"), "cycle": cycle, "event": event, "usd": usd}
        jsonl.append(tmp_path / RETRAIN_ROWS, RetrainRow.model_validate(row))

    def reserved() -> float:
        return month(tmp_path, PARAMS, at("2026-11-03")).reserved_usd

    assert reserved() == 0
    record("a", "begin")
    assert reserved() == 0
    record("a", "reserved", 3.0)
    assert reserved() == 3
    record("b", "begin")
    record("b", "cost", 1.0)  # of the search, before anything was put aside
    assert reserved() == 0
    record("b", "reserved", 7.0)
    assert reserved() == 7
    record("a", "cost", 2.0)
    record("b", "begin")
    assert reserved() == 7
    record("b", "cost", 6.0)
    assert reserved() == 0


def test_a_month_has_its_name_and_what_is_left_of_it(tmp_path: Path) -> None:
    result = month(tmp_path, PARAMS, at("2026-11-03"))
    assert result == ("2026-11", 0, 50, 0.0, [])
    assert Month("2026-11", 3.0, 50.0, 4.0).left_usd == 43.0
    assert Month("2026-11", 3.0, None, 4.0).left_usd is None


def test_a_run_without_params_that_can_be_read_is_paid_at_todays_prices(tmp_path: Path) -> None:
    a_run(tmp_path, "cycle", at("2026-11-05"), 10)
    (tmp_path / "runs" / "pipeline" / "cycle" / "params.yaml").unlink()
    dear = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=720"])
    assert run_usd(tmp_path, dear, "cycle") == pytest.approx(20)
    a_run(tmp_path, "kept", at("2026-11-06"), 10)
    assert run_usd(tmp_path, dear, "kept") == pytest.approx(10)


def test_only_the_start_of_a_run_says_what_it_is_for(tmp_path: Path) -> None:
    a_run(tmp_path, "by-hand", at("2026-11-05"), 10, retrain=False)
    late = PipelineRow(time=at("2026-11-05"), run_id="by-hand", event="end", detail={PURPOSE: "flow"})
    jsonl.append(tmp_path / "runs" / "pipeline.jsonl", late)
    assert month(tmp_path, PARAMS, at("2026-11-30")).spent_usd == 0


def test_a_month_has_every_workspace_of_the_project_by_kind(tmp_path: Path) -> None:
    params = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=360", "budget.monthly_usd=20"])
    study = tmp_path / STUDIES / "levers"
    a_run(tmp_path, "by-hand", at("2026-11-05"), 5, retrain=False)
    a_run(tmp_path, "cycle", at("2026-11-06"), 3)
    a_run(study, "variant", at("2026-11-07"), 10, retrain=False)
    jsonl.append(tmp_path / RETRAIN_ROWS, RetrainRow(
        time=at("2026-11-06"), cycle="c", event="cost", usd=1.5, detail={"process": "judge"},
    ))  # fmt: skip
    for root in (tmp_path, study):
        result = month(root, params, at("2026-11-30"), every_run=True)
        sums = {kind: sum(item.usd for item in result.expenses if item.kind == kind) for kind in PLURALS}
        assert sums == pytest.approx({"run": 5, "study": 10, "retraining": 3, "judge": 1.5})
        assert (result.spent_usd, result.left_usd) == pytest.approx((19.5, 0.5))
        assert "runs $5.00, studies $10.00, retraining $3.00, judges $1.50" in result.words()
    assert month(tmp_path, params, at("2026-11-30")).spent_usd == pytest.approx(4.5), "of the retrain cycles"
    assert (project_of(study), workspaces_of(study)) == (tmp_path, [tmp_path, study])


def test_a_months_limit_that_is_spent_refuses_in_one_line_with_the_sum_and_where_it_went(tmp_path: Path) -> None:
    params = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=360", "budget.monthly_usd=12"])
    assert refusal(tmp_path, params) is None
    a_run(tmp_path / STUDIES / "levers", "variant", time.time(), 13, retrain=False)
    line = refusal(tmp_path, params)
    assert line is not None
    assert line.startswith("budget.monthly_usd=12 is reached: $13.00 are spent in 2")
    assert "studies $13.00 (rlhf report --month)" in line
