"""Calibrating serving: real models behind the real front, for moments."""

from pathlib import Path

import pytest
import yaml

from config.load import load
from config.workspace.machine import SERVING_FILE
from costs.planning.serving import plan_serving
from costs.planning.serving_pace import serving_rates
from costs.planning.target import Target
from costs.tables.catalogue import hardware, own_price
from tasks.serving import calibrate
from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_rates_of_this_machine_plan_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(calibrate, "SMALL_SECONDS", 0.7)
    monkeypatch.setattr(calibrate, "LARGE_SECONDS", 1.0)
    said: list[str] = []
    rates = calibrate.measured_rates(ROOT, said.append)
    (tmp_path / ".rlhf").mkdir()
    (tmp_path / SERVING_FILE).write_text(yaml.safe_dump(rates.model_dump(mode="json")))
    assert serving_rates(tmp_path) == rates
    assert len(said) == 6
    assert {item.weights for item in rates.large} == {"f32", "q8_0", "q4_0"}
    assert [item.concurrency for item in rates.small] == [1, 4, 16, 1, 4, 16]
    assert 20e6 < rates.process_bytes < 1e9
    # a reply costs more the longer it is and the larger the model, and less in a batch
    by_load = {(item.concurrency, round(item.output_tokens / 20)): item for item in rates.small}
    assert by_load[1, 2].seconds_per_reply > by_load[1, 1].seconds_per_reply
    large = [item for item in rates.large if item.weights == "f32"]
    assert large[0].seconds_per_reply > 2 * by_load[1, 1].seconds_per_reply
    target = Target(hardware("cpu"), own_price(0.1, "a test", "today"), root=tmp_path)
    plan = plan_serving(load(ROOT / "recipes/demo.yaml"), target, "q8_0", 16, (1, 16))
    assert plan.calibrated
    assert 20 < plan.loads[0].tokens_per_second < plan.loads[1].tokens_per_second * 2
