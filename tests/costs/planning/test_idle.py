"""Devices that wait while a stage uses fewer are in its cost: in the plan, and as it was."""

from pathlib import Path

import pytest

from config.load import load
from costs.ledger.attempts import read_attempts
from costs.ledger.budget import spent
from costs.ledger.ledger import ledger
from costs.ledger.reconcile import reconcile
from costs.planning.planner import idle_device_seconds, idle_note, plan
from costs.planning.retraining import plan_cycle
from costs.planning.target import target
from costs.tables.price import StagePrice, rented_devices
from tests.conftest import ROOT

NODE = ROOT / "recipes" / "node-8gpu.yaml"
APART = [
    "where.data.pool=small", "where.evaluate.pool=small",
    "prices.device_by_pool={small: l4}", "prices.usd_per_device_hour_by_pool={small: 0.5}",
]  # fmt: skip
USD = 2.95


def test_seven_of_eight_devices_wait_while_one_works() -> None:
    assert idle_device_seconds([(1, 8, 100.0), (8, 8, 3600.0), (1, 8, 50.0)]) == 7 * 150
    assert idle_device_seconds([(8, 8, 100.0), (1, 1, 50.0)]) == idle_device_seconds([]) == 0


def test_devices_that_wait_for_data_and_evaluation_are_in_the_plans_cost() -> None:
    params = load(NODE)
    made = plan(params, target(params, None, None, None, Path("nowhere")))
    alone = [stage for stage in made.stages if stage.gpus == 1]
    assert [stage.stage for stage in alone] == ["data", "evaluate"]
    for stage in made.stages:
        assert stage.rented == 8
        assert stage.usd.expected == pytest.approx(8 * stage.seconds / 3600 * USD)
        assert sum(phase.usd for phase in stage.phases) == pytest.approx(stage.usd.expected)
        assert stage.gpu_hours == pytest.approx(stage.gpus * stage.seconds / 3600)
    idle = 7 * sum(stage.seconds for stage in alone) / 3600 * USD
    assert made.total["idle_usd"] == pytest.approx(idle)
    assert made.total["usd"]["expected"] == pytest.approx(8 * made.total["seconds"] / 3600 * USD)
    (note,) = [line for line in made.assumptions if "rented together" in line]
    assert f"{idle:.4g} USD, in these stages' cost" in note
    assert "data (1), evaluate (1)" in note


def test_one_stage_planned_alone_costs_what_it_costs_in_its_run() -> None:
    params = load(NODE)
    aim = target(params, None, None, None, Path("nowhere"))
    whole = {stage.stage: stage for stage in plan(params, aim).stages}
    for name in ("data", "evaluate"):
        assert plan(params, aim, (name,)).stages[0].usd == whole[name].usd


def test_the_contest_of_a_cycle_makes_the_machines_devices_wait() -> None:
    params = load(NODE)
    aim = target(params, None, None, None, Path("nowhere"))
    for stage in plan_cycle(plan(params, aim), params, aim).stages:
        assert stage.usd.expected == pytest.approx(8 * stage.seconds / 3600 * USD)


def test_what_runs_in_a_pool_of_its_own_waits_for_nobody() -> None:
    params = load(NODE, APART)
    made = plan(params, target(params, None, None, None, Path("nowhere")))
    assert idle_note(made.stages) == ()
    assert made.total["idle_usd"] == 0
    assert [stage.rented for stage in made.stages] == [1, 8, 8, 8, 1]
    assert [rented_devices(params, name) for name in ("evaluate", "sft", None)] == [1, 8, 8]


def test_with_a_number_of_devices_all_stages_have_as_many() -> None:
    params = load(NODE)
    made = plan(params, target(params, None, 2, None, Path("nowhere")))
    assert {(stage.gpus, stage.rented) for stage in made.stages} == {(2, 2)}


def usage(folder: Path, stage: str, seconds: float, world_size: int) -> None:
    """One attempt of a stage of run `r1` that did its work."""
    place = folder / "runs" / stage
    place.mkdir(parents=True, exist_ok=True)
    begin, end = 1000.0, 1000.0 + seconds
    common = f'"run_id": "r1", "attempt": 1, "device": "cuda", "world_size": {world_size}'
    place.joinpath("usage.jsonl").write_text(
        f'{{"time": {end}, {common}, "step": 1, "phase": "train", "seconds": {seconds}, '
        '"tokens": 10, "sequences": 1, "peak_bytes": 1}\n'
    )
    event = (
        '{{"time": {}, '
        + common.replace("{", "{{")
        + (', "event": "{}", "fingerprint": "f", "pid": 1, "step": 1, "exit_code": {}}}\n')
    )
    place.joinpath("attempts.jsonl").write_text(
        event.format(begin, "start", "null") + event.format(end, "end", 0)
    )
    with (folder / "runs" / "pipeline.jsonl").open("a") as rows:
        rows.write(
            f'{{"time": {end}, "run_id": "r1", "event": "stage", "stage": "{stage}", '
            '"cached": false, "attempt": 1, "state": "done"}\n'
        )


@pytest.mark.parametrize(("sets", "waiting"), [([], 7), (APART, 0)])
def test_the_ledger_and_the_budget_pay_for_those_that_wait(
    sets: list[str], waiting: int, tmp_path: Path
) -> None:
    params = load(NODE, sets)
    (tmp_path / "runs").mkdir()
    usage(tmp_path, "sft", 100.0, 8)
    usage(tmp_path, "evaluate", 60.0, 1)
    book = ledger(tmp_path, params, "r1")
    sft, evaluate = (book.stage(name) for name in ("sft", "evaluate"))
    assert sft is not None
    assert evaluate is not None
    price = USD if waiting else 0.5
    assert sft.usd == pytest.approx(8 * 100 / 3600 * USD)
    assert sft.idle_usd == 0
    assert evaluate.usd == pytest.approx((1 + waiting) * 60 / 3600 * price)
    assert evaluate.idle_usd == pytest.approx(waiting * 60 / 3600 * price)
    assert evaluate.device_seconds == 60.0  # working
    assert sum(phase.usd for phase in evaluate.made) == pytest.approx(evaluate.usd)
    attempts, _ = read_attempts(tmp_path / "runs" / "evaluate")
    paid = spent(attempts, ["r1"], StagePrice(price, rented_devices(params, "evaluate")))
    assert paid.usd == pytest.approx(evaluate.usd)
    # the plan beside it is in the same money
    made = plan(params, target(params, None, None, None, Path("nowhere")), ("evaluate",))
    beside = reconcile(made.as_json(), book).stage("evaluate")
    assert beside is not None
    assert beside.total.planned_usd == pytest.approx(made.stages[0].usd.expected)
