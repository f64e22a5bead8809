"""Devices that wait while a stage uses fewer are in its cost: in the plan, and as it was."""

from pathlib import Path

import pytest

from config.load import load
from costs.ledger.attempts import read_attempts
from costs.ledger.budget import spent
from costs.ledger.ledger import read_ledger
from costs.ledger.reconcile import reconcile
from costs.planning.planner import plan
from costs.planning.retraining import plan_cycle
from costs.planning.target import find_target
from costs.tables.price import StagePrice, rented_devices
from tests.conftest import ROOT

NODE = ROOT / "recipes" / "node-8gpu.yaml"
APART = [
    "where.data.pool=small", "where.evaluate.pool=small",
    "prices.device_by_pool={small: l4}", "prices.usd_per_device_hour_by_pool={small: 0.5}",
]  # fmt: skip
USD = 2.95


def test_the_contest_of_a_cycle_makes_the_machines_devices_wait() -> None:
    params = load(NODE)
    target = find_target(params, None, None, None, Path("nowhere"))
    for stage in plan_cycle(plan(params, target), params, target).stages:
        assert stage.usd.expected == pytest.approx(8 * stage.seconds / 3600 * USD)


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
    place.joinpath("attempts.jsonl").write_text(event.format(begin, "start", "null") + event.format(end, "end", 0))
    with (folder / "runs" / "pipeline.jsonl").open("a") as rows:
        rows.write(
            f'{{"time": {end}, "run_id": "r1", "event": "stage", "stage": "{stage}", '
            '"cached": false, "attempt": 1, "state": "done"}\n'
        )


@pytest.mark.parametrize(("sets", "waiting"), [([], 7), (APART, 0)])
def test_the_ledger_and_the_budget_pay_for_those_that_wait(sets: list[str], waiting: int, tmp_path: Path) -> None:
    params = load(NODE, sets)
    (tmp_path / "runs").mkdir()
    usage(tmp_path, "sft", 100.0, 8)
    usage(tmp_path, "evaluate", 60.0, 1)
    ledger = read_ledger(tmp_path, params, "r1")
    sft, evaluate = (ledger.stage(name) for name in ("sft", "evaluate"))
    assert sft is not None
    assert evaluate is not None
    price = USD if waiting else 0.5
    assert sft.usd == pytest.approx(8 * 100 / 3600 * USD)
    assert sft.idle_usd == 0
    assert evaluate.usd == pytest.approx((1 + waiting) * 60 / 3600 * price)
    assert evaluate.idle_usd == pytest.approx(waiting * 60 / 3600 * price)
    assert evaluate.device_seconds == 60.0  # working
    assert sum(phase.usd for phase in evaluate.useful_phases) == pytest.approx(evaluate.usd)
    attempts, _ = read_attempts(tmp_path / "runs" / "evaluate")
    paid = spent(attempts, ["r1"], StagePrice(price, rented_devices(params, "evaluate")))
    assert paid.usd == pytest.approx(evaluate.usd)
    # the plan beside it is in the same money
    planned = plan(params, find_target(params, None, None, None, Path("nowhere")), ("evaluate",))
    beside = reconcile(planned.as_json(), ledger).stage("evaluate")
    assert beside is not None
    assert beside.total.planned_usd == pytest.approx(planned.stages[0].usd.expected)
