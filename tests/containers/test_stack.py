"""The stack on a real engine: two pipelines, the second waits for the first, each stage in a container of its own, one
of them killed. Run by `make test-containers`.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from cli.docker import SECRETS
from config.load import load
from config.records import stages_of
from config.schema import Params
from tasks.deployment.automations import SILENCE_SECONDS
from tasks.deployment.compose_setup import placed
from tests.conftest import ROOT
from tests.containers.stack import TINY, Stack, docker, status

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(5400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

MIB = 2**20
STAGES = stages_of("ppo")
UPDATES = 200
"""Of PPO: enough that its container can be killed in the midst."""
RUN_SECONDS = 2400.0
"""Two runs of five containers take 4 minutes on an idle machine of 2 cores; a busy one is not a failure."""
PRICE = 1.8
"""USD per device-hour of the Docker pool."""


@pytest.fixture(scope="module")
def runs(stack: Stack) -> dict[str, dict[str, Any]]:
    """Two runs at once that differ in their seed; the first one's container of PPO is killed once it has a checkpoint
    in the store.
    """
    ids = {
        name: stack.start_run(tiny(f"seed={seed}", f"tracking.experiment={name}"))
        for name, seed in (("first", 1), ("second", 2))
    }
    killed = kill_at_work(stack, "ppo", list(ids.values()))
    ends = {name: stack.await_end(flow_run, RUN_SECONDS) for name, flow_run in ids.items()}
    assert {name: state["type"] for name, state in ends.items()} == {"first": "COMPLETED", "second": "COMPLETED"}, (
        ends,
        stack.logs(),
    )
    return {name: {"id": ids[name], "killed": killed, **results(stack, name)} for name in ids}


def tiny(*changes: str) -> dict[str, Any]:
    """The tiny recipe with every stage on the Docker pool, and PPO long enough to be caught while it runs."""
    params: Params = load(
        ROOT / TINY, [f"ppo.updates={UPDATES}", f"prices.usd_per_device_hour_by_pool={{docker: {PRICE}}}", *changes]
    )
    return placed(params, "docker", "http://mlflow:5000")


def kill_at_work(stack: Stack, stage: str, flow_runs: list[str]) -> str:
    """Kill the first container of a stage once it can be gone on from."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        result = stack.stage_containers(stage)
        stored = stack.objects(f"dvc/checkpoints/{stage}/")
        if result and any(key.endswith("/manifest.json") for key in stored):
            docker("kill", "--signal", "KILL", result[0])
            return result[0]
        states = {flow_run: stack.state(flow_run) for flow_run in flow_runs}
        assert any(state["type"] not in ("COMPLETED", "FAILED", "CRASHED") for state in states.values()), (
            states,
            stack.logs(),
        )
        time.sleep(0.3)
    raise AssertionError(f"not every container of {stage} sent a checkpoint: {stack.logs()}")


def results(stack: Stack, experiment: str) -> dict[str, Any]:
    """What MLflow has of a run: the parent's metrics, and the stage attempts."""
    client = MlflowClient(stack.mlflow)
    result = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=100)
    parents = [run for run in result if run.data.tags["rlhf.kind"] == "run"]
    attempts = {
        f"{run.data.tags['rlhf.stage']}/{run.data.tags['rlhf.attempt']}": run
        for run in result
        if run.data.tags["rlhf.kind"] == "stage"
    }
    assert len(parents) == 1
    return {"parent": parents[0], "attempts": attempts}


def test_the_images_are_small_and_without_rights_or_secrets(images: dict[str, str], stack: Stack) -> None:
    base = size(images["base"])
    assert size(images["orchestrator"]) - base < 775 * MIB, "900 MB with a base of 125 MB"
    assert size(images["train"]) - base < 2375 * MIB, "2.5 GB with a base of 125 MB"
    for target in ("orchestrator", "train"):
        assert docker("run", "--rm", images[target], "id", "-u").strip() == "1000"
        history = docker("history", "--no-trunc", images[target]) + docker("inspect", images[target])
        assert not any(word in history for word in ("PASSWORD=", "SECRET", "aws_secret"))
    no_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    docker("run", "--rm", images["orchestrator"], "python", "-c", no_torch)
    hidden = docker("run", "--rm", images["train"], "sh", "-c", "ls -a /app /app/docker")
    assert ".git\n" not in hidden
    assert ".env" not in hidden


def size(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image))


def test_two_pipelines_at_once_do_not_mix(runs: dict[str, dict[str, Any]]) -> None:
    digests = {name: run["parent"].data.tags["dvc.model_digest"] for name, run in runs.items()}
    assert digests["first"] != digests["second"]
    for run in runs.values():
        assert {key.split("/")[0] for key in run["attempts"]} == set(STAGES)
        assert "eval/gold_aligned" in run["parent"].data.metrics


def test_a_killed_container_goes_on_in_a_new_one_from_its_checkpoint(
    runs: dict[str, dict[str, Any]], stack: Stack
) -> None:
    tries = {name: sorted(key for key in run["attempts"] if key.startswith("ppo/")) for name, run in runs.items()}
    assert sorted(map(len, tries.values())) == [1, 2], tries
    struck = next(name for name, keys in tries.items() if len(keys) == 2)
    first, second = (runs[struck]["attempts"][key] for key in tries[struck])
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    client = MlflowClient(stack.mlflow)
    steps = [
        [metric.step for metric in client.get_metric_history(run.info.run_id, "ppo/score")] for run in (first, second)
    ]
    assert min(steps[1]) > 1, "it went on, and did not begin anew"
    assert set(steps[0]) | set(steps[1]) == set(range(1, UPDATES + 1))


def test_the_ledger_counts_every_container_at_the_price_of_its_pool(runs: dict[str, dict[str, Any]]) -> None:
    for run in runs.values():
        metrics = run["parent"].data.metrics
        by_stage = {name: value for name, value in metrics.items() if name.startswith("stage_usd/")}
        assert len(by_stage) == len(STAGES)
        assert metrics["cost/usd"] == pytest.approx(sum(by_stage.values()))
        assert metrics["cost/usd"] == pytest.approx(metrics["cost/gpu_hours"] * PRICE)


def test_data_and_models_are_in_the_store_and_what_was_for_the_way_is_gone(
    stack: Stack, runs: dict[str, dict[str, Any]]
) -> None:
    assert len(stack.objects("dvc/files/md5/")) > 20
    assert stack.objects(bucket="rlhf-mlflow")
    assert sum(key.endswith("/ppo.json") for key in stack.objects("dvc/origins/")) == len(runs)
    assert stack.objects("dvc/locks/") == []
    assert stack.objects("dvc/checkpoints/") == []
    assert stack.objects("dvc/exchange/") == []


def test_a_later_run_finds_what_the_earlier_one_of_both_has_made(
    stack: Stack, runs: dict[str, dict[str, Any]]
) -> None:
    seed = {"first": 1, "second": 2}[min(runs, key=lambda name: runs[name]["parent"].info.end_time)]
    flow_run = stack.start_run(tiny(f"seed={seed}", "tracking.experiment=again"))
    assert stack.await_end(flow_run, RUN_SECONDS)["type"] == "COMPLETED"
    again = results(stack, "again")
    assert (again["attempts"], again["parent"].data.metrics["cost/usd"]) == ({}, 0.0)


def test_no_secret_is_in_a_log_a_parameter_or_a_pool(stack: Stack, runs: dict[str, dict[str, Any]]) -> None:
    said = stack.compose("logs", "--no-color")
    kept = (
        str(stack.ask("/work_pools/filter", {}))
        + str(stack.ask("/flow_runs/filter", {}))
        + str(stack.ask("/deployments/filter", {}))
    )
    kept += str(stack.ask("/logs/filter", {"limit": 200}))
    kept += str([(run["parent"].data.params, run["parent"].data.tags) for run in runs.values()])
    for name in set(SECRETS) - {n for n in SECRETS if n.endswith("ACCESS_KEY")}:
        assert stack.secrets[name] not in said, name
        assert stack.secrets[name] not in kept, name


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("nowhere", r"where\.sft\.pool=nowhere: Prefect has no work pool of that name"),
        ("docker-gpu", r"where\.sft\.pool=docker-gpu: no worker serves this work pool"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_runs(stack: Stack, pool: str, words: str) -> None:
    content = tiny("seed=3", "tracking.experiment=refused")
    content["where"]["sft"] = {"pool": pool}
    state = stack.await_end(stack.start_run(content), 600)
    assert state["type"] == "FAILED"
    assert re.search(words, state["message"]), state["message"]


def test_an_image_that_is_missing_is_told_before_anything_is_paid_for(stack: Stack) -> None:
    pool = stack.ask("/work_pools/docker")
    template = pool["base_job_template"]
    template["variables"]["properties"]["image"]["default"] = "rlhf-train:absent"
    template["variables"]["properties"]["image_pull_policy"]["default"] = "Never"
    stack.ask("/work_pools/", {"name": "broken", "type": "docker", "base_job_template": template})
    worker = ["python", "-m", "prefect", "worker", "start", "--pool", "broken", "--type", "docker"]
    stack.compose("run", "--detach", "--no-deps", "docker-worker", *worker)
    content = tiny("seed=4", "tracking.experiment=broken")
    content["where"]["default"]["pool"] = "broken"
    state = stack.await_end(stack.start_run(content), 900)
    assert state["type"] == "FAILED"
    assert "work pool broken cannot run any stage" in state["message"]
    assert "\n" not in state["message"]


def test_links_lead_to_pages_that_a_browser_here_can_open(stack: Stack, runs: dict[str, dict[str, Any]]) -> None:
    result = stack.ask("/artifacts/filter", {"limit": 200})
    printed = stack.compose("logs", "--no-color", "cpu-worker", "docker-worker")
    assert re.findall(r"[Vv]iew .*https?://(?:prefect|mlflow)\b.*", printed) == []
    shown = "\n".join(str(artifact["data"]) for artifact in result)
    shown += "\n".join(row["message"] for row in stack.ask("/logs/filter", {"limit": 200}))
    shown += str([run["parent"].data.tags for run in runs.values()])
    links = set(re.findall(r"https?://[^\s)\"'>\]]+", shown))
    assert [link for link in links if re.match(r"https?://(prefect|mlflow|s3)\b.*[/#]", link)] == []
    pages = {link for link in links if link.startswith(stack.mlflow)}
    assert pages, links
    login = f"rlhf:{stack.secrets['MLFLOW_PASSWORD']}"
    assert {status(page, login) for page in pages} == {200}


EXPORT = [
    {
        "id": number,
        "data": {"prompt": f"What is {number} and {number}?", "response1": "a", "response2": "b"},
        "annotations": [
            {
                "completed_by": 1,
                "created_at": "2026-01-01T00:00:00Z",
                "result": [{"type": "pairwise", "value": {"selected": "left"}}],
            }
        ],
    }
    for number in range(3)
]
"""Of Label Studio: three votes."""


def test_votes_are_imported_once_into_the_workspace_that_remembers(stack: Stack, tmp_path: Path) -> None:
    export = tmp_path / "export.json"
    export.write_text(json.dumps(EXPORT))
    export.chmod(0o644)
    stack.compose("cp", str(export), "cpu-worker:/workspaces/export.json")
    parameters = {"file": "/workspaces/export.json", "form": "label-studio", "columns": {}}
    for _ in range(2):
        state = stack.await_end(stack.start("label-import/label-import", parameters), 600)
        assert state["type"] == "COMPLETED", (state, stack.logs())
    votes = in_project(stack, "cat data/labels/votes.jsonl").splitlines()
    assert len(votes) == len(EXPORT)


def test_retraining_compares_with_the_champion_and_keeps_what_it_learned_of_the_data(
    stack: Stack, runs: dict[str, dict[str, Any]]
) -> None:
    schedules = stack.ask("/deployments/name/retrain/retrain")["schedules"]
    assert [(schedule["slug"], schedule["active"]) for schedule in schedules] == [("weekly", False)]
    changes = ("seed=1", "tracking.experiment=project")
    params = {**tiny(*changes)}
    named = stack.start("promote/promote", {"params": params, "why": "the first one"})
    assert stack.await_end(named, RUN_SECONDS)["name"] == "Promoted", stack.logs()
    record = json.loads(in_project(stack, "cat champions/record.json"))
    first = record["lineage"][-1]["run_id"]

    params = tiny("seed=3", *changes[1:])
    params["where"]["data"] = {"pool": "local"}
    cycle = stack.await_end(stack.start("retrain/retrain", {"params": params, "force": True}), RUN_SECONDS)
    assert (cycle["type"], cycle["name"]) in {("COMPLETED", "Kept"), ("COMPLETED", "Promoted")}, (cycle, stack.logs())
    rows = in_project(stack, "cat runs/retrain.jsonl").splitlines()
    last = json.loads(rows[-1])
    assert (last["outcome"], last["detail"]["champion"]) == (cycle["name"].lower(), first)
    again = stack.start("retrain/retrain", {"params": params, "force": False})
    assert stack.await_end(again, 900)["name"] == "Skipped", "nothing is new"


def test_the_champion_is_served_in_the_stack(stack: Stack) -> None:
    stack.compose("--profile", "serve", "up", "--detach", "--wait", "--no-deps", "serve")
    key = stack.compose("exec", "-T", "serve", "cat", ".rlhf/serve.key")
    champion = json.loads(in_project(stack, "cat champions/record.json"))["lineage"][-1]["run_id"]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    cases: list[tuple[int, dict[str, str]]] = [(200, {"Authorization": f"Bearer {key}"}), (401, {})]
    for wanted, headers in cases:
        answer = httpx.post(f"{stack.model}/v1/chat/completions", json=chat, headers=headers)
        assert answer.status_code == wanted, answer.text
        assert wanted != 200 or answer.json()["model"] == champion


def in_project(stack: Stack, command: str) -> str:
    """What a command prints in the workspace that remembers."""
    return stack.compose("exec", "-T", "-w", "/workspaces/project", "cpu-worker", "sh", "-c", command)


def test_a_run_whose_worker_was_killed_does_not_run_for_ever(stack: Stack) -> None:
    flow_run = stack.start_run(tiny("seed=5", "tracking.experiment=killed", "ppo.updates=100000"))
    deadline = time.monotonic() + RUN_SECONDS
    while not (stack.state(flow_run)["type"] == "RUNNING" and stack.stage_containers("ppo")):
        assert stack.state(flow_run)["type"] not in ("FAILED", "CRASHED"), stack.logs()
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(2)
    stack.compose("kill", "--signal", "KILL", "cpu-worker")
    try:
        state = stack.await_end(flow_run, SILENCE_SECONDS + 240)
        assert (state["type"], state["name"]) == ("CRASHED", "Zombie")
        assert "resumes from its checkpoint" in state["message"]
    finally:
        for container in stack.stage_containers("ppo"):
            docker("kill", container, check=False)
        stack.compose("up", "--detach", "--no-deps", "cpu-worker")
