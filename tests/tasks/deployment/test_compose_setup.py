"""What the stack of containers serves: every flow of prefect.yaml, each in its workspace."""

from typing import Any

import pytest

from config.load import load
from config.records import STAGES
from config.schema import Params
from tasks.deployment.compose_setup import NODES, deployment, pull_steps
from tasks.deployment.deployments import prefect_file
from tests.conftest import ROOT

URI = "http://mlflow:5000"


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, Any]]:
    params = load(ROOT / "recipes" / "demo.yaml")
    return {
        item["name"]: deployment(item, params, {"MLFLOW_TRACKING_URI": URI})
        for item in prefect_file(ROOT)["deployments"]
    }


def test_the_stack_serves_what_a_checkout_serves(served: dict[str, dict[str, Any]]) -> None:
    assert set(served) == {"start", "rlhf", "retrain", "promote", "study", "serve-bench", "label-import"}
    for name, item in served.items():
        assert set(item["parameters"]) == set(item["parameter_openapi_schema"]["properties"]), name
    schema = served["label-import"]["parameter_openapi_schema"]
    assert schema["properties"]["form"]["enum"] == ["label-studio", "argilla"]


def test_retraining_has_its_schedule_switched_off_and_no_second_cycle_beside_it(
    served: dict[str, dict[str, Any]],
) -> None:
    retrain = served["retrain"]
    [weekly] = retrain["schedules"]
    assert (weekly.slug, weekly.active, weekly.schedule.cron) == ("weekly", False, "0 3 * * 1")
    assert retrain["concurrency_limit"] == 1
    assert retrain["concurrency_options"].collision_strategy == "CANCEL_NEW"
    assert [item["schedules"] for name, item in served.items() if name != "retrain"] == [[]] * 6


def test_forms_place_stages_on_nodes_and_data_where_the_votes_are(served: dict[str, dict[str, Any]]) -> None:
    for name in ("rlhf", "retrain", "promote"):
        params = Params.model_validate(served[name]["parameters"]["params"])
        assert params.tracking.uri == URI
        pools = {stage: params.where.of(stage).pool for stage in STAGES}
        assert pools.pop("data") == "local"
        assert set(pools.values()) == {NODES}


def test_a_workspace_is_a_step_that_exists() -> None:
    from tasks.run import workspace

    [step, _] = pull_steps("s3://rlhf/dvc")
    [(name, arguments)] = step.items()
    assert callable(getattr(workspace, name.rpartition(".")[2]))
    assert arguments == {"id": "workspace", "remote": "s3://rlhf/dvc"}
