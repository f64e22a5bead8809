"""What runs measured of a stage by the size of their model: which rows count, and the slope."""

from pathlib import Path
from typing import Any

import pytest

from config import jsonl
from config.load import load, write
from config.records import PlannedRow, kept_folder
from costs.ledger.history import HISTORY, this_machine
from costs.ledger.measured_growth import NEWEST, Measured, measured, measured_exponent
from costs.planning.settings import base_shape
from tests.conftest import ROOT


def remembered(root: Path, run_id: str, layers: int, **changes: Any) -> float:
    """A run that is remembered and has kept its params; returns the size of its model."""
    params = load(ROOT / "recipes" / "demo.yaml", [f"model.random.layers={layers}"])
    write(params, kept_folder(root, run_id) / "params.yaml")
    row = {
        "time": 1.0,
        "run_id": run_id,
        "machine": this_machine(),
        "hardware": "cpu",
        "stage": "sft",
        "phase": "",
        "planned_seconds": 4.0,
        "measured_seconds": 8.0,
        "planned_peak_bytes": 16.0,
        "measured_peak_bytes": 32.0,
    }
    jsonl.append(root / HISTORY, PlannedRow.model_validate(row | changes))
    return base_shape(params, root).parameters


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(NEWEST + 3):
        kept_folder(tmp_path, f"r{number}").mkdir(parents=True)
    kept_folder(tmp_path, "other").mkdir(parents=True)
    return tmp_path


def test_whole_stages_of_runs_whose_params_are_kept_count(root: Path) -> None:
    small, large = remembered(root, "r1", 1), remembered(root, "r2", 3, planned_seconds=5.0)
    remembered(root, "other", 1, stage="reward")
    remembered(root, "other", 1, phase="train")
    remembered(root, "r3", 2)
    (kept_folder(root, "r3") / "params.yaml").write_text("of: an older schema\n")
    assert measured(root, "sft") == [
        Measured("r1", small, 4.0, 8.0, 32.0),
        Measured("r2", large, 5.0, 8.0, 32.0),
    ]
    assert small < large


def test_the_newest_are_shown(root: Path) -> None:
    for number in range(NEWEST + 2):
        remembered(root, f"r{number}", 1)
    assert [run.run_id for run in measured(root, "sft")] == [f"r{n}" for n in range(2, NEWEST + 2)]


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    runs = [Measured("r", size, 1.0, 3.0 * size**1.5, 1.0) for size in (1e6, 4e6, 9e6)]
    assert measured_exponent(runs) == pytest.approx(1.5)
    assert measured_exponent(runs[:2]) == pytest.approx(1.5)
    assert measured_exponent([runs[0], runs[0]]) is None
    assert measured_exponent([]) is None
