import re
from pathlib import Path

import pytest
import yaml

from config.load import load
from tasks.deployment.automations import SILENCE_SECONDS
from tasks.ui.links import MLFLOW_UI_VARIABLE, PREFECT_UI_VARIABLE, pages
from tests.conftest import ROOT


def test_links_lead_where_people_reach_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = load(ROOT / "recipes" / "demo.yaml", ["tracking.uri=http://mlflow:5000"])
    assert pages(tmp_path, params, [])["mlflow"].startswith("http://mlflow:5000/#/")
    monkeypatch.setenv(MLFLOW_UI_VARIABLE, "http://127.0.0.1:5001/")
    monkeypatch.setenv(PREFECT_UI_VARIABLE, "http://127.0.0.1:4201")
    result = pages(tmp_path, params, [])
    assert result["mlflow"].startswith("http://127.0.0.1:5001/#/")
    assert result["prefect"] == "http://127.0.0.1:4201"


def test_the_workers_of_the_stack_show_signs_of_life_and_know_where_people_look() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    environment = services["cpu-worker"]["environment"]
    assert int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) * 2 < SILENCE_SECONDS
    for name in (PREFECT_UI_VARIABLE, MLFLOW_UI_VARIABLE):
        assert re.match(r"http://127\.0\.0\.1:", environment[name])
