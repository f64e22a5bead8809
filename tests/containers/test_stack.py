"""The stack on a real engine: two pipelines, the second waits for the first, on two nodes of its Ray cluster. One node
is killed in the first run, one is stopped in the second. Run by `make test-containers`.
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
from tasks.deployment.compose_setup import NODES as POOL
from tasks.deployment.compose_setup import placed
from tests.conftest import ROOT
from tests.containers.stack import FINAL, NODES, TINY, Stack, docker, status

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(5400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

MIB = 2**20
STAGES = stages_of("ppo")
UPDATES = 200
"""Of PPO: enough that a node can be lost in the midst."""
RUN_SECONDS = 2400.0
"""Two runs take 6 minutes on an idle machine of 2 cores; a busy one is not a failure."""
ORPHAN_SECONDS = 120.0
"""Until the last stage of a pipeline that is gone has ended."""
PRICE = 1.8
"""USD per device-hour of the pool."""


@pytest.fixture(scope="module")
def runs(stack: Stack) -> dict[str, dict[str, Any]]:
    """Two runs that differ in their seed, with PPO on both nodes. Once the store has a checkpoint of it, one node is
    killed in the first run and one is stopped in the second; each is started again.
    """
    ids = {
        name: stack.start_run(tiny(f"seed={seed}", f"tracking.experiment={name}"))
        for name, seed in (("first", 1), ("second", 2))
    }
    for name, strike in (("first", ("kill",)), ("second", ("stop", "--time", "600"))):
        node = a_node_at_work(stack, ids[name])
        docker(*strike, node, timeout=660)
        docker("start", node)
        state = stack.await_end(ids[name], RUN_SECONDS)
        assert state["type"] == "COMPLETED", (state, stack.logs())
    return {name: {"id": ids[name], **results(stack, name)} for name in ids}


def tiny(*changes: str) -> dict[str, Any]:
    """The tiny recipe with every stage on the pool of the stack's nodes, and PPO on both of them, long enough to be
    caught while it runs.
    """
    params: Params = load(
        ROOT / TINY, [f"ppo.updates={UPDATES}", f"prices.usd_per_device_hour_by_pool={{{POOL}: {PRICE}}}", *changes]
    )
    content = placed(params, POOL, "http://mlflow:5000")
    content["where"]["ppo"] = {**content["where"].get("ppo", {}), "nodes": 2, "processes": 2}
    return content


def a_node_at_work(stack: Stack, flow_run: str) -> str:
    """A container that runs PPO, once it can be gone on from."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        nodes = stack.nodes_of("ppo")
        stored = stack.objects("dvc/checkpoints/ppo/")
        if len(nodes) == NODES and any(key.endswith("/manifest.json") for key in stored):
            return nodes[1]
        state = stack.state(flow_run)
        assert state["type"] not in ("COMPLETED", "FAILED", "CRASHED"), (state, stack.logs())
        time.sleep(0.3)
    raise AssertionError(f"PPO sent no checkpoint: {stack.logs()}")


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


def steps_of(run: dict[str, Any], stack: Stack) -> list[list[int]]:
    """Updates of each attempt at PPO, in order."""
    tries = sorted(key for key in run["attempts"] if key.startswith("ppo/"))
    client = MlflowClient(stack.mlflow)
    histories = [client.get_metric_history(run["attempts"][key].info.run_id, "ppo/score") for key in tries]
    return [[metric.step for metric in history] for history in histories]


def test_a_killed_node_costs_what_came_after_the_last_checkpoint(
    runs: dict[str, dict[str, Any]], stack: Stack
) -> None:
    steps = steps_of(runs["first"], stack)
    assert len(steps) == 2, steps
    assert min(steps[1]) > 1, "it went on, and did not begin anew"
    assert set(steps[0]) | set(steps[1]) == set(range(1, UPDATES + 1))
    assert [runs["first"]["attempts"][f"ppo/{n}"].info.status for n in (1, 2)] == ["KILLED", "FINISHED"]


def test_a_stopped_node_costs_nothing_twice(runs: dict[str, dict[str, Any]], stack: Stack) -> None:
    steps = steps_of(runs["second"], stack)
    assert len(steps) == 2, steps
    assert steps[0] + steps[1] == list(range(1, UPDATES + 1)), "its stage checkpointed within the grace"


def test_both_nodes_are_in_the_ledger(runs: dict[str, dict[str, Any]], stack: Stack) -> None:
    rows = [json.loads(line) for line in in_project(stack, "cat runs/ppo/usage.jsonl").splitlines()]
    assert {row["world_size"] for row in rows} == {2}
    usd = sum(run["parent"].data.metrics["stage_usd/ppo"] for run in runs.values())
    assert usd >= 0.99 * 2 * PRICE * sum(row["seconds"] for row in rows) / 3600


def test_the_ledger_counts_every_stage_at_the_price_of_its_pool(runs: dict[str, dict[str, Any]]) -> None:
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


def test_a_pool_without_nodes_is_told_while_it_is_waited_for_and_a_cancel_is_heard(stack: Stack) -> None:
    content = tiny("seed=3", "tracking.experiment=refused")
    content["where"]["sft"] = {"pool": "nowhere"}
    flow_run = stack.start_run(content)
    deadline = time.monotonic() + 600
    waiting = "no node of the Ray cluster has the label pool=nowhere"
    query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200}
    while not any(waiting in row["message"] for row in stack.ask("/logs/filter", query)):
        assert stack.state(flow_run)["type"] not in FINAL, stack.state(flow_run)
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(2)
    stack.ask(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert stack.await_end(flow_run, 300)["type"] == "CANCELLED"


def test_links_lead_to_pages_that_a_browser_here_can_open(stack: Stack, runs: dict[str, dict[str, Any]]) -> None:
    result = stack.ask("/artifacts/filter", {"limit": 200})
    printed = stack.compose("logs", "--no-color", "cpu-worker", "ray-worker")
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
    while not (stack.state(flow_run)["type"] == "RUNNING" and stack.nodes_of("ppo")):
        assert stack.state(flow_run)["type"] not in ("FAILED", "CRASHED"), stack.logs()
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(2)
    stack.compose("kill", "--signal", "KILL", "cpu-worker")
    try:
        state = stack.await_end(flow_run, SILENCE_SECONDS + 240)
        assert (state["type"], state["name"]) == ("CRASHED", "Zombie")
        assert "resumes from its checkpoint" in state["message"]
        # a node gives the head a minute to come back, and its stage takes a checkpoint
        deadline = time.monotonic() + ORPHAN_SECONDS
        while stack.nodes_of("ppo"):
            assert time.monotonic() < deadline, "no stage runs on when its pipeline is gone"
            time.sleep(2)
    finally:
        stack.compose("up", "--detach", "--no-deps", "cpu-worker")
