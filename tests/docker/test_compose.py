"""docker/compose.yaml read as compose reads it: who reaches whom, who has which key, and what no run can change."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from cli.docker import SECRETS
from tasks.deployment.compose_setup import container_template, pipeline_template
from tasks.run.code_version import PACKAGES
from tests.conftest import ROOT
from tests.docker.test_pools import ENVIRONMENT, configured

ROOT_OF_STORE = {"S3_ACCESS_KEY", "S3_SECRET_KEY"}
STAGE_KEYS = {"S3_STAGE_ACCESS_KEY", "S3_STAGE_SECRET_KEY"}
MLFLOW_KEYS = {"S3_MLFLOW_ACCESS_KEY", "S3_MLFLOW_SECRET_KEY"}


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()))


def secrets_of(service: dict[str, Any]) -> set[str]:
    """The secrets of .env that a service has in its environment."""
    return set(re.findall(r"\$\{(\w+)", str(service.get("environment", {})))) & set(SECRETS)


def test_a_stage_reaches_the_store_and_prefects_api_and_nothing_else(stack: dict[str, Any]) -> None:
    reached = {n for n, service in stack["services"].items() if "stages" in service["networks"]}
    assert reached == {"s3", "prefect"}
    network = stack["services"]["setup"]["environment"]["RLHF_NETWORK"]
    assert network.endswith("_stages")


def test_only_the_two_servers_reach_the_databases(stack: dict[str, Any]) -> None:
    reached = {n for n, service in stack["services"].items() if "databases" in service["networks"]}
    assert reached == {"postgres", "prefect", "mlflow"}
    assert stack["networks"]["databases"] == {"internal": True}
    assert stack["services"]["postgres"]["networks"] == ["databases"]


def test_only_the_proxy_has_the_socket_and_only_workers_of_stages_reach_it(stack: dict[str, Any]) -> None:
    services = stack["services"]
    socket = {n for n, service in services.items() if "docker.sock" in str(service)}
    assert socket == {"engine-proxy"}
    reached = {n for n, service in services.items() if "engine" in service["networks"]}
    assert reached == {"engine-proxy", "docker-worker", "gpu-worker"}
    assert stack["networks"]["engine"] == {"internal": True}
    assert services["engine-proxy"]["networks"] == ["engine"]
    assert {services[n]["environment"]["DOCKER_HOST"] for n in ("docker-worker", "gpu-worker")} == {
        "tcp://engine-proxy:2375"
    }


def test_every_service_has_the_secrets_it_needs_and_no_other(stack: dict[str, Any]) -> None:
    assert {name: secrets_of(service) for name, service in stack["services"].items()} == {
        "postgres": {"POSTGRES_PASSWORD"},
        "s3-setup": set(),
        "s3": ROOT_OF_STORE | STAGE_KEYS | MLFLOW_KEYS,
        "prefect": {"POSTGRES_PASSWORD", "PREFECT_KEY"},
        "mlflow": {"POSTGRES_PASSWORD", "MLFLOW_PASSWORD"} | MLFLOW_KEYS,
        "setup": {"PREFECT_KEY"} | ROOT_OF_STORE | STAGE_KEYS,
        "cpu-worker": {"PREFECT_KEY", "MLFLOW_PASSWORD"},
        "engine-proxy": set(),
        "docker-worker": {"PREFECT_KEY"},
        "gpu-worker": {"PREFECT_KEY"},
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
    for name in ("setup", "cpu-worker", "docker-worker", "gpu-worker"):
        page = stack["services"][name]["environment"]["PREFECT_UI_URL"]
        assert page.startswith("http://127.0.0.1:"), name
    template = container_template({**ENVIRONMENT, "PREFECT_UI_URL": "http://127.0.0.1:1"}, False)
    told = template["variables"]["properties"]["env"]["default"]
    assert told["PREFECT_UI_URL"] == "http://127.0.0.1:1"


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


@pytest.mark.parametrize("gpus", [False, True])
def test_no_run_can_change_command_volumes_network_or_rights(gpus: bool) -> None:
    template = container_template(ENVIRONMENT, gpus)
    assert set(template["variables"]["properties"]) == {
        "image", "image_pull_policy", "env", "labels", "name", "auto_remove", "stream_output",
        "mem_limit", "shm_size",
    }  # fmt: skip
    job = configured(template)
    assert job.command == "python -m prefect.engine"
    assert not job.privileged
    assert (job.container_create_kwargs or {})["cap_drop"] == ["ALL"]
    assert (job.container_create_kwargs or {})["security_opt"] == ["no-new-privileges"]


def test_no_run_can_change_the_command_of_a_pipeline() -> None:
    template = pipeline_template()
    assert {"command", "working_dir"}.isdisjoint(template["variables"]["properties"])
    assert template["job_configuration"]["command"] == "python -m prefect.engine"
    assert "{{ command }}" not in json.dumps(template)
