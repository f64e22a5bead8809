"""When more updates do not pay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.records import USD_PER_SECOND_VARIABLE
from tests.training.support.processes import metric_rows
from tests.training.support.tiny import stop_after_a_step, work
from training.rl.gain import WINDOW, gain_per_usd


def test_the_gain_is_of_the_last_window_over_the_one_before_for_what_it_cost() -> None:
    before = [(0.1 * i, 0.01, 7.0) for i in range(WINDOW)]
    last = [(0.1 * i + 0.5, 0.04, 2.0) for i in range(WINDOW)]
    gain = gain_per_usd([(99.0, 99.0, 99.0), *before, *last], usd_per_second=0.05)
    assert gain is not None
    usd = WINDOW * 2.0 * 0.05
    error = (WINDOW * 0.01 + WINDOW * 0.04) ** 0.5 / WINDOW
    assert gain.mean == pytest.approx(0.5 / usd)
    assert gain.high == pytest.approx((0.5 + 1.96 * error) / usd)
    assert gain_per_usd([*before, *last][1:], 0.05) is None


@pytest.mark.parametrize(
    ("limit", "price", "updates"), [(1e9, "1.0", 10), (None, "1.0", 12), (1e-9, "1.0e-6", 12), (1e9, None, 12)]
)
def test_a_stage_ends_as_done_where_a_dollar_gains_too_little(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, limit: float | None, price: str | None, updates: int
) -> None:
    if price is not None:
        monkeypatch.setenv(USD_PER_SECOND_VARIABLE, price)
    section: dict[str, Any] = {"updates": 12, "checkpoint_every_updates": 1}
    root = project("grpo", grpo=section, budget={"min_gain_per_usd": limit})
    for _ in range(3):  # what it has seen is in its checkpoints
        stop_after_a_step(root, "grpo")
    work(root, "grpo")
    assert json.loads((root / "metrics/grpo.json").read_text())["updates"] == updates
    assert [row.step for row in metric_rows(root, "grpo")] == list(range(1, updates + 1))
