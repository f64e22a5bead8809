from pathlib import Path

import pytest

from config import jsonl
from config.champions import Champion
from config.retraining import RETRAIN_ROWS, RetrainRow
from tasks.retraining.cycle import nothing_new

CHAMPION = Champion(run_id="r1", method="ppo", model_digest="m", data_version="d", data_key="old")


def ended(root: Path, outcome: str, data_key: str | None) -> None:
    jsonl.append(
        root / RETRAIN_ROWS,
        RetrainRow(
            time=1.0, cycle="c1", event="end", outcome=outcome, data_key=data_key, said="so it is"
        ),
    )


def test_the_champions_own_data_is_not_new(tmp_path: Path) -> None:
    assert (nothing_new(tmp_path, CHAMPION, "old") or "").startswith(
        "nothing is new since the champion's data"
    )
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
