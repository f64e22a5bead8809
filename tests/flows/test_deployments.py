"""What `rlhf up` offers in the Prefect UI, on real servers with a real worker, over stages that are quick."""

import re
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.schemas.objects import WorkPoolStatus

from config.errors import ParamsError
from config.load import load
from config.workspace.at_work import locked
from config.workspace.rows import pipeline_rows
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import servers
from tests.conftest import ROOT
from tests.flows.stack import Stack, stack

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Prefect's own clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RECIPE = ROOT / "recipes" / "demo.yaml"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
    assert servers(running.root) == []


def test_every_deployment_of_prefect_yaml_is_there_prefilled_from_the_recipe(up: Stack) -> None:
    result = {deployment.name: deployment for deployment in up.client.read_deployments()}
    wanted = {item["name"]: item for item in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert set(result) == set(wanted)
    for name, deployment in result.items():
        assert deployment.tags == wanted[name]["tags"]
        assert deployment.description == wanted[name]["description"]
    assert up.client.read_work_pool("cpu").status == WorkPoolStatus.READY
    assert result["rlhf"].parameters == {"params": load(RECIPE).model_dump(mode="json")}


FORMS = ("rlhf", "retrain", "promote", "start", "study", "serve-bench", "label-import")


def form_of(up: Stack, flow: str) -> dict[str, Any]:
    schema = up.client.read_deployment_by_name(f"{flow}/{flow}").parameter_openapi_schema
    return schema or {}


def test_the_form_knows_descriptions_bounds_and_choices(up: Stack) -> None:
    schema: dict[str, Any] = up.client.read_deployment_by_name("rlhf/rlhf").parameter_openapi_schema or {}
    ppo = schema["definitions"]["Ppo"]["properties"]
    assert (ppo["batch_size"]["minimum"], ppo["batch_size"]["type"]) == (1, "integer")
    assert ppo["layout"]["enum"] == ["separate", "shared_trunk", "shared_base"]
    assert all(field.get("description") for field in ppo.values() if "$ref" not in field)
    for name in FORMS:
        shown = form_of(up, name)["properties"]
        assert [key for key, field in shown.items() if not field.get("description")] == [], name


@pytest.mark.parametrize(
    "changes", [{"ppo__num_mini_batches": 7}, {"ppo__cliprange": -1}], ids=["combination", "bound"]
)
def test_a_wrong_value_is_refused_in_the_words_of_the_command_line(up: Stack, changes: dict[str, Any]) -> None:
    run = up.await_end(up.start(**changes))
    (name, value), *_ = changes.items()
    with pytest.raises(ParamsError) as refused:
        load(RECIPE, [f"{name.replace('__', '.')}={value}"])
    assert run.state is not None
    assert (
        run.state.name,
        refused.value.args[0].replace("from --set", "in the form").replace(str(RECIPE), "the form")
        in str(run.state.message),
    ) == ("Failed", True)
    assert not (up.root / "runs" / "pipeline.jsonl").exists()


def test_the_short_form_starts_the_pipeline_or_says_in_a_line_why_not(up: Stack) -> None:
    schema: dict[str, Any] = up.client.read_deployment_by_name("start/start").parameter_openapi_schema or {}
    assert list(schema["properties"]) == ["recipe", "method", "max_usd", "seed", "changes"]
    assert all(field["description"] for field in schema["properties"].values())
    refused = up.await_end(up.start("start/start", seed=-1))
    assert refused.state is not None
    assert (refused.state.name, refused.state.message) == (
        "Failed",
        "seed=-1 in the form: input should be greater than or equal to 0.",
    )
    raised = re.compile(r"^\S*Error: seed=-1 ", re.MULTILINE)  # how a traceback of it would end
    assert raised.search(up.worker_log()) is None
    changes = [{"key": "sft.epochs", "value": "3"}]
    started = up.await_end(up.start("start/start", seed=5, changes=changes))
    assert started.state is not None
    assert (started.state.name, started.state.type) == ("Started", "COMPLETED")
    name, _, link = str(started.state.message).partition(": ")
    run_id = UUID(link.rpartition("/")[2])
    assert link.startswith(up.server("prefect").url)
    run = up.await_end(run_id)
    assert (run.name, run.state_name) == (name, "Completed")
    expected = load(RECIPE, ["seed=5", "sft.epochs=3"]).model_dump(mode="json")
    assert {**run.parameters["params"], "tracking": expected["tracking"]} == expected


@pytest.mark.slow
def test_training_runs_go_one_at_a_time_in_the_order_they_came(up: Stack) -> None:
    up.behave("slow")
    runs = [up.start(), up.start(), up.start("label-import/label-import")]
    light = up.await_end(runs[2])
    assert "data/raw/export.json does not exist" in str(light.state and light.state.message)
    assert not any(up.run(run).state.is_final() for run in runs[:2]), "an import does not wait for training"  # type: ignore[union-attr]
    first, second = (up.await_end(run) for run in runs[:2])
    assert (first.state_name, second.state_name) == ("Completed", "Completed")
    assert first.end_time is not None
    assert second.start_time is not None
    assert second.start_time >= first.end_time
    rows = pipeline_rows(up.root)
    assert [row.state for row in rows if row.event == "end"] == ["completed", "completed"]
    assert [row.cached for row in rows if row.event == "stage"] == [False] * 5 + [True] * 5


def test_a_deployed_run_waits_for_one_from_the_command_line(up: Stack) -> None:
    with locked(up.root):
        waiting = up.start()
        up.await_state(waiting, "Running")
        deadline = time.monotonic() + 60
        while "waiting for its end" not in up.worker_log():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert up.await_end(waiting).state_name == "Completed"


def test_a_study_that_is_not_there_is_named(up: Stack) -> None:
    run = up.await_end(up.start("study/study", file="studies/magic.yaml"))
    assert run.state is not None
    assert run.state.name == "Failed"
    assert "studies/magic.yaml cannot be read" in str(run.state.message)


def test_up_again_changes_nothing(up: Stack) -> None:
    before = servers(up.root)
    updated = {deployment.name: deployment.updated for deployment in up.client.read_deployments()}
    up.up()
    assert servers(up.root) == before
    assert {deployment.name: deployment.updated for deployment in up.client.read_deployments()} == updated


def test_the_schedule_of_retraining_is_off_and_stays_as_somebody_switched_it(up: Stack) -> None:
    deployment = up.client.read_deployment_by_name("retrain/retrain")
    (schedule,) = deployment.schedules
    assert not schedule.active
    up.client.update_deployment_schedule(deployment.id, schedule.id, active=True)
    path = up.root / "prefect.yaml"
    path.write_text(path.read_text().replace("0 3 * * 1", "0 4 * * 1"))
    printed = up.up()
    (schedule,) = up.client.read_deployment_schedules(deployment.id)
    assert (schedule.active, schedule.schedule.cron) == (True, "0 4 * * 1")  # type: ignore[union-attr]
    assert "(retrain/retrain, on a schedule)" in printed


def test_the_key_is_printed_and_kept_in_its_file_alone(up: Stack) -> None:
    key = api_key(up.root)
    assert f"Key      {key} " in up.up()
    running = [process for server in servers(up.root) for process in family(server.pid)]
    assert not [process for process in running if key in " ".join(process.cmdline())]
    kept = {
        path.relative_to(up.root).as_posix()
        for path in up.root.rglob("*")
        if path.is_file() and key.encode() in path.read_bytes()
    }
    assert kept == {".rlhf/prefect.key"}


def test_down_leaves_no_process(up: Stack) -> None:
    running = servers(up.root)
    assert [server.name for server in running] == ["prefect", "mlflow", "worker"]
    processes = [process for server in running for process in family(server.pid)]
    up.rlhf("down")
    assert not [process for process in processes if process.is_running()]


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
