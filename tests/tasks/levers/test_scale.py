"""How cost grows, measured on the tiny recipe."""

from pathlib import Path

import pytest

from config import jsonl
from config.errors import ParamsError
from config.load import load
from config.records import UsageRow
from config.workspace.levers import FOLDER, read_scale
from costs.levers.growth import exponent
from tasks.levers.scale import Measuring
from tasks.run.stop import StopRequest
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("quick_stages")]

TINY = load(ROOT / "tests/e2e/tiny.yaml")


@pytest.mark.slow
def test_the_growth_of_updates_is_that_of_its_points(tmp_path: Path) -> None:
    found = Measuring(tmp_path, TINY, True, ["steps"], StopRequest()).run()
    (steps,) = found.factors
    assert [point.size for point in steps.points] == [1, 2, 4]
    assert steps.planned_exponent == pytest.approx(1)
    seconds = [point.measured_seconds for point in steps.points]
    assert steps.exponent == pytest.approx(exponent([1, 2, 4], seconds))
    assert steps.exponent_low <= steps.exponent <= steps.exponent_high
    for point in steps.points:
        own = point.stages["ppo"]
        phases = {name for name in own if name.startswith("measured/")}
        assert {"measured/rollout", "measured/update"} <= phases
        assert point.measured_seconds == pytest.approx(sum(own[name] for name in phases))
        assert point.planned_usd > 0
    assert read_scale(tmp_path) == found
    paths = (tmp_path / FOLDER / "stages").glob("ppo-*/runs/ppo/usage.jsonl")
    rows = [jsonl.read(path, UsageRow).rows for path in paths]
    assert sorted(max(row.step for row in each) for each in rows) == [4, 8, 16]


def test_a_name_that_is_no_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"--only magic is not a factor\. Known: model, sequence"):
        Measuring(tmp_path, TINY, True, ["magic"], StopRequest())
