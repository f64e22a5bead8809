from pathlib import Path

import pytest

from config import jsonl
from config.errors import UserError
from config.load import load
from config.workspace.champions import Champion
from config.workspace.retraining import RETRAIN_ROWS, RetrainRow
from tasks.retraining.cycle import Cycle, nothing_new
from tests.conftest import ROOT

CHAMPION = Champion(run_id="r1", method="ppo", model_digest="m", data_version="d", data_key="old")


def ended(root: Path, outcome: str, data_key: str | None) -> None:
    jsonl.append(
        root / RETRAIN_ROWS,
        RetrainRow(time=1.0, cycle="c1", event="end", outcome=outcome, data_key=data_key, said="so it is"),
    )


def test_the_champions_own_data_is_not_new(tmp_path: Path) -> None:
    assert (nothing_new(tmp_path, CHAMPION, "old") or "").startswith("nothing is new since the champion's data")
    assert nothing_new(tmp_path, CHAMPION, "new") is None


def test_a_source_that_only_reading_tells_about_is_read(tmp_path: Path) -> None:
    ended(tmp_path, "kept", None)
    assert nothing_new(tmp_path, CHAMPION, None) is None


@pytest.mark.parametrize(
    ("outcome", "tried"),
    [("kept", True), ("promoted", True), ("skipped", False), ("stopped", False), ("failed", False)],
)
def test_data_that_a_trained_model_was_decided_on_is_not_tried_again(
    tmp_path: Path, outcome: str, tried: bool
) -> None:
    ended(tmp_path, "kept", "older")
    ended(tmp_path, outcome, "new")
    ended(tmp_path, "skipped", "new")
    reason = nothing_new(tmp_path, CHAMPION, "new")
    assert (reason is not None) is tried
    assert not tried or f"which ended as {outcome} (so it is)" in str(reason)


@pytest.mark.integration
def test_a_helper_that_fails_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the cycle that takes a while and then finds its input missing."""
    room = tmp_path / "training" / "retraining"
    room.mkdir(parents=True)
    (room / "examine.py").write_text(
        "import sys, time\ntime.sleep(0.5)\nsys.exit(print('votes.csv is gone', file=sys.stderr) or 2)"
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    params = load(ROOT / "recipes" / "demo.yaml", ["prices.usd_per_device_hour=720"])
    cycle = Cycle(tmp_path, params)
    with pytest.raises(UserError, match="votes"):
        cycle.helper("examine")
    (row,) = jsonl.read(tmp_path / RETRAIN_ROWS, RetrainRow).rows
    assert (row.event, row.detail) == ("cost", {"process": "examine"})
    assert row.usd >= 0.1, "half a second at 0.2 USD"
    assert cycle.usd == row.usd
