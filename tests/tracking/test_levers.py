"""A comparison of levers in a real MLflow database."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from config.load import load
from tests.conftest import ROOT
from tests.support.levers import comparison, variant
from tracking.levers import log_levers

pytestmark = pytest.mark.integration


def test_a_parent_with_a_child_per_variant_and_again_the_same(tmp_path: Path) -> None:
    params = load(ROOT / "tests/e2e/tiny.yaml")
    page = tmp_path / "levers.html"
    page.write_text("the page")
    first = log_levers(tmp_path, params, comparison(), [page, tmp_path / "gone.yaml"])
    more = comparison(variant("late", None, None, "not here", reason="no GPU"))
    assert log_levers(tmp_path, params, more, [page]) == first
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == params.tracking.experiment]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"levers of ppo", "baseline", "cheap", "worse", "late"}
    parent = runs.pop("levers of ppo")
    assert parent.data.metrics["levers/regret"] == 0
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["levers.html"]
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {first}
    cheap = runs["cheap"].data
    assert (cheap.metrics["levers/measured_usd"], cheap.params) == (0.002, {"ppo.lam": "0.9"})
    assert cheap.tags["rlhf.same_quality"] == "True"
    assert runs["late"].data.tags["rlhf.message"] == "no GPU"
    assert {run.info.status for name, run in runs.items() if name != "late"} == {"FINISHED"}
    took = {name: run.info.end_time - run.info.start_time for name, run in runs.items()}
    assert took == {"baseline": 30_000, "cheap": 30_000, "worse": 30_000, "late": 30_000}
    assert parent.info.end_time - parent.info.start_time == 4 * 30_000
