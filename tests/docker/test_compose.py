"""docker/compose.yaml read as compose reads it: who reaches whom, who has which key, and what no run can change."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from cli.docker import SECRETS
from config.load import load
from config.records import STAGES
from config.sections.where import Where
from tasks.cluster.member import HEAD_NAME
from tasks.deployment.compose_setup import NODES as POOL_OF_NODES
from tasks.deployment.compose_setup import TOKEN, pipeline_template, placed
from tasks.run.workspace import PACKAGES
from tests.conftest import ROOT

NODES = ("ray-worker", "ray-gpu-worker")
ROOT_OF_STORE = {"S3_ACCESS_KEY", "S3_SECRET_KEY"}
STAGE_KEYS = {"S3_STAGE_ACCESS_KEY", "S3_STAGE_SECRET_KEY"}
MLFLOW_KEYS = {"S3_MLFLOW_ACCESS_KEY", "S3_MLFLOW_SECRET_KEY"}


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()))


def secrets_of(service: dict[str, Any]) -> set[str]:
    """The secrets of .env that a service has in its environment."""
    return set(re.findall(r"\$\{(\w+)", str(service.get("environment", {})))) & set(SECRETS)


def test_a_stage_reaches_the_store_and_the_cluster_and_nothing_else(stack: dict[str, Any]) -> None:
    reached = {n for n, service in stack["services"].items() if "stages" in service["networks"]}
    assert reached == {"s3", "cpu-worker", *NODES}
    assert {n: stack["services"][n]["networks"] for n in NODES} == {name: ["stages"] for name in NODES}


def test_a_cluster_lets_in_who_has_its_token_and_listens_on_the_stages_network(stack: dict[str, Any]) -> None:
    services = stack["services"]
    for name in ("cpu-worker", *NODES):
        environment = services[name]["environment"]
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", str(TOKEN)), name
        assert "credentials:/run/rlhf:ro" in services[name]["volumes"], name
    assert services["cpu-worker"]["networks"]["stages"]["aliases"] == [HEAD_NAME]
    command = services["cpu-worker"]["command"]
    assert command[command.index("--num-cpus") + 1] == "0", "no placed stage runs beside the pipelines"
    pools = [services[n]["command"][-1] for n in NODES]
    assert pools == [f"pool={POOL_OF_NODES}", "pool=gpus"]


def test_only_the_two_servers_reach_the_databases(stack: dict[str, Any]) -> None:
    reached = {n for n, service in stack["services"].items() if "databases" in service["networks"]}
    assert reached == {"postgres", "prefect", "mlflow"}
    assert stack["networks"]["databases"] == {"internal": True}
    assert stack["services"]["postgres"]["networks"] == ["databases"]


def test_nobody_has_the_engines_socket(stack: dict[str, Any]) -> None:
    assert "docker.sock" not in str(stack)


def test_every_service_has_the_secrets_it_needs_and_no_other(stack: dict[str, Any]) -> None:
    assert {name: secrets_of(service) for name, service in stack["services"].items()} == {
        "postgres": {"POSTGRES_PASSWORD"},
        "s3-setup": set(),
        "s3": ROOT_OF_STORE | STAGE_KEYS | MLFLOW_KEYS,
        "prefect": {"POSTGRES_PASSWORD", "PREFECT_KEY"},
        "mlflow": {"POSTGRES_PASSWORD", "MLFLOW_PASSWORD"} | MLFLOW_KEYS,
        "setup": {"PREFECT_KEY"} | ROOT_OF_STORE | STAGE_KEYS,
        "cpu-worker": {"PREFECT_KEY", "MLFLOW_PASSWORD"},
        "ray-worker": set(),
        "ray-gpu-worker": set(),
        "serve": set(),
    }


def test_the_served_model_reaches_nothing_and_knows_the_addresses_people_call(stack: dict[str, Any]) -> None:
    serve = stack["services"]["serve"]
    assert serve["networks"] == ["serve"]
    assert [n for n, s in stack["services"].items() if "serve" in s["networks"]] == ["serve"]
    port = serve["ports"][0].rpartition(":")[0]
    assert port == "127.0.0.1:${SERVE_PORT:-8000}"
    assert port in serve["command"]


def test_prefect_asks_for_a_key_and_knows_its_addresses(stack: dict[str, Any]) -> None:
    prefect = stack["services"]["prefect"]
    assert prefect["command"][:3] == ["python", "-m", "tasks.servers.prefect_server"]
    addresses = prefect["command"][prefect["command"].index("--address") + 1 :]
    assert addresses[0] == "prefect:4200", "what the clients of the stack name"
    assert prefect["environment"]["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "true"
    assert prefect["environment"]["PREFECT_SERVER_API_AUTH_STRING"] == "${PREFECT_KEY}"


def test_links_name_addresses_that_people_reach(stack: dict[str, Any]) -> None:
    for name in ("setup", "cpu-worker"):
        page = stack["services"][name]["environment"]["PREFECT_UI_URL"]
        assert page.startswith("http://127.0.0.1:"), name


def test_pages_are_on_this_machine_only_and_nobody_has_linux_capabilities(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if name != "postgres":
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name


def test_every_image_of_others_is_named_by_its_digest(stack: dict[str, Any]) -> None:
    built_here = {n for n, service in stack["services"].items() if ":-rlhf-" in service["image"]}
    assert set(stack["services"]) - built_here == {"postgres", "s3"}
    for name in ("postgres", "s3"):
        image = stack["services"][name]["image"]
        assert re.fullmatch(r"\$\{\w+:-[\w/]+:[\w.]+@sha256:[0-9a-f]{64}\}", image), name
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert base
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", base[1])


def test_images_and_the_digest_of_the_code_have_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    result = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.removesuffix("*") for name in result}
    sent = set((ROOT / ".dockerignore").read_text().splitlines())
    assert {f"!{name}" for name in packages} <= sent
    assert set(PACKAGES) == packages


def test_no_run_can_change_the_command_of_a_pipeline() -> None:
    template = pipeline_template()
    assert {"command", "working_dir"}.isdisjoint(template["variables"]["properties"])
    assert template["job_configuration"]["command"] == "python -m prefect.engine"
    assert "{{ command }}" not in json.dumps(template)


def test_the_form_is_prefilled_with_every_stage_on_the_pool() -> None:
    content = placed(
        load(ROOT / "recipes" / "demo.yaml", ["where.sft={pool: mine, processes: 2}"]), "cpu", "http://mlflow:5000"
    )
    where = Where.model_validate(content["where"])
    assert {where.of(stage).pool for stage in STAGES} == {"cpu"}
    assert where.of("sft").processes == 2
    assert content["tracking"]["uri"] == "http://mlflow:5000"
