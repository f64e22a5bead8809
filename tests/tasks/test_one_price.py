"""An hour of a stage costs the same wherever it is shown, charged or bounded."""

from pathlib import Path

import pytest

from config import jsonl
from config.load import load
from config.records import UsageRow, stages_of
from config.schema import Params
from config.sections.where import LOCAL
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from costs.ledger.ledger import read_ledger
from costs.tables.price import stage_price
from tasks.planning.prepared import spent_by_stage
from tasks.retraining import cycle
from tasks.run.changed_code import changed_since_checkpoint
from tasks.run.purse import run_usd
from tasks.run.run import Run
from tasks.stage import progress
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.process import Ended
from tests.conftest import ROOT
from tests.support.clock import FINGERPRINT, Clock
from tracking.rows import usage_metrics

HOUR = 3600.0
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def an_hour(root: Path, params: Params, stage: str) -> UsageRow:
    """One whole attempt of a stage in run `r`, which took an hour."""
    clock = Clock(root, "r", HOUR, params.where.of(stage).processes)
    clock.attempt(stage, 1, "start")
    row = clock.use(stage, 1, "train", 1, HOUR, 1, 1)
    clock.done(stage, 1, 1)
    return row


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_consumer_prices_an_hour_of_a_stage_alike(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load(recipe, ["budget.max_usd=1000000", "budget.max_hours=null"])
    total = 0.0
    for stage in stages_of(params.align.method):
        watch = progress.Watch(tmp_path, params, stage)
        row = an_hour(tmp_path, params, stage)
        ledger = read_ledger(tmp_path, params, "r").stage(stage)
        assert ledger is not None
        place = params.where.of(stage)
        assert ledger.usd >= place.processes * params.prices.usd_per_device_hour > 0
        total += ledger.usd

        shipped = {
            usage_metric.key: usage_metric.value for usage_metric in usage_metrics(row, stage_price(params, stage))
        }
        assert shipped["phase/train/usd"] == pytest.approx(ledger.usd)

        monkeypatch.setattr(progress, "now", lambda: 0.0)
        watch.look()
        monkeypatch.setattr(progress, "now", lambda: HOUR)
        assert watch.look().usd == pytest.approx(ledger.usd)

        assert spent_by_stage(tmp_path, params, ["r"])[stage].usd == pytest.approx(ledger.usd)

        remaining = BudgetWatch(Run(tmp_path, "other", params), stage).time_left(place.processes)
        assert remaining is not None
        assert params.budget.max_usd is not None
        hours = remaining.seconds / HOUR
        assert hours * ledger.usd == pytest.approx(params.budget.max_usd)

        checkpoint = tmp_path / "checkpoints" / stage / FINGERPRINT / "step-1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        (checkpoint / "code.json").write_text('{"training/gone.py": "0"}')
        changed = changed_since_checkpoint(tmp_path, params, stage)
        assert changed is not None
        assert changed.cost.usd == pytest.approx(ledger.usd)
    assert run_usd(tmp_path, params, "r") == pytest.approx(total)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_an_hour_of_the_contest_costs_what_an_hour_of_the_machine_costs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = load(recipe)
    moments = iter([0.0, HOUR])
    monkeypatch.setattr(cycle, "now", lambda: next(moments))
    monkeypatch.setattr(cycle, "run_process", lambda *_: Ended(1, 0, HOUR, ""))
    retraining = cycle.Cycle(tmp_path, params)
    retraining.helper("contest")
    (row,) = jsonl.read(tmp_path / RETRAIN_ROWS, RetrainRow).rows
    places = [params.where.of(stage) for stage in stages_of(params.align.method)]
    devices = max((place.processes for place in places if place.pool == LOCAL), default=1)
    hour = stage_price(params).usd_per_device_hour
    assert row.usd == retraining.usd == pytest.approx(devices * hour)
