"""What is wrong with a work pool or a store is reported before a stage is handed over: a real Prefect server, real
workers, no engine.
"""

import base64
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Pending

from config.errors import EnvironmentFault
from config.ports import HOST, free_port
from tasks.deployment.automations import follow_lives
from tasks.remote.pools import FLOW, PARAMETERS, require_served, state_of, submit, withdraw
from tasks.servers.plans import prefect_plan
from tasks.servers.prefect_settings import api_key
from tasks.servers.processes import start, stop
from tests.conftest import ROOT
from tests.docker.test_pools import ENVIRONMENT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a Prefect server."""
    root, port = tmp_path_factory.mktemp("server"), free_port()
    url = f"http://{HOST}:{port}/api"
    try:
        start(root, [prefect_plan(root, port)])
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: api_key(root)}),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("PREFECT_API_AUTH_STRING", api_key(root))
            yield url
    finally:
        stop(root)


@pytest.fixture
def client(server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as result:
        yield result


def test_runs_that_are_submitted_at_the_same_moment_are_all_taken(server: str, client: SyncPrefectClient) -> None:
    flow = client.create_flow_from_name("submitted")
    form = client.create_deployment(flow, "submitted")
    given = {"state": {"type": "CANCELLED", "name": "Never to start"}}
    login = base64.b64encode(os.environ["PREFECT_API_AUTH_STRING"].encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Prefect-Csrf-Client": "a page"}
    none_kept = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=server, headers=headers, timeout=300, limits=none_kept) as page:
        token = page.get("/csrf-token", params={"client": "a page"}).json()["token"]

        def submit(_: int) -> int:
            """As the server's page does: once, whatever the answer."""
            url, sent = f"/deployments/{form}/create_flow_run", {"Prefect-Csrf-Token": token}
            return page.post(url, json=given, headers=sent).status_code

        with ThreadPoolExecutor(8) as submitting:
            assert Counter(submitting.map(submit, range(64))) == {201: 64}


def template(**defaults: Any) -> dict[str, Any]:
    from tasks.deployment.compose_setup import container_template

    result = container_template(ENVIRONMENT, gpus=False)
    result["job_configuration"]["networks"] = []
    for name, value in {"env": {}, "mem_limit": None, **defaults}.items():
        result["variables"]["properties"][name]["default"] = value
    return result


def worker(server: str, pool: str, **environment: str) -> str:
    """What a Docker worker of `pool` prints that looks once for what is to be done."""
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "docker",
        "--run-once",
        "--install-policy",
        "never",
    ]
    variables = {**os.environ, "PREFECT_API_URL": server, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, timeout=240, check=False)
    return done.stdout + done.stderr


def refused(pool: str) -> str:
    """The one line with which a pool is refused."""
    with pytest.raises(EnvironmentFault) as fault:
        require_served(pool, "where.sft.pool")
    said = str(fault.value)
    assert said.startswith(f"where.sft.pool={pool}: ")
    assert "\n" not in said
    return said


def test_a_pool_is_refused_until_it_is_there_has_an_image_is_at_work_and_served(
    server: str, client: SyncPrefectClient
) -> None:
    assert "Prefect has no work pool of that name. Make it: prefect work-pool create gpus" in refused("gpus")
    client.create_work_pool(WorkPoolCreate(name="processes", type="process", base_job_template={}))
    assert "this work pool starts processes" in refused("processes")
    # it makes the pool that it does not find
    worker(server, "gpus", DOCKER_HOST="unix:///nowhere.sock")
    assert "names no image" in refused("gpus")
    client.update_work_pool("gpus", WorkPoolUpdate(base_job_template=template(), is_paused=True))
    assert "is paused. Resume it: prefect work-pool resume gpus" in refused("gpus")
    client.update_work_pool("gpus", WorkPoolUpdate(is_paused=False))
    client.create_work_pool(WorkPoolCreate(name="idle", type="docker", base_job_template=template()))
    assert (
        "no worker serves this work pool, a stage would wait forever. Start one: prefect worker "
        "start --pool idle" in refused("idle")
    )


def test_an_engine_that_is_not_there_is_why_the_check_ends(server: str, client: SyncPrefectClient) -> None:
    client.create_work_pool(WorkPoolCreate(name="no-engine", type="docker", base_job_template=template()))
    result = submit("no-engine", "/request", "check-1 of run-1")
    worker(server, "no-engine", DOCKER_HOST="unix:///nowhere.sock")
    state = state_of(result.id)
    assert state.is_crashed()
    assert "Could not connect to Docker" in state.message
    flow_run = client.read_flow_run(result.id)
    assert flow_run.parameters == {"request": "/request"}


def test_the_automations_that_follow_runs_are_made_once(server: str, client: SyncPrefectClient) -> None:
    for _ in range(2):
        follow_lives(client)
    assert sorted(automation.name for automation in client.read_automations()) == [
        "rlhf: living runs",
        "rlhf: runs that never started",
        "rlhf: zombie runs",
    ]


def test_a_stage_that_no_worker_has_begun_is_withdrawn(server: str, client: SyncPrefectClient) -> None:
    client.create_work_pool(WorkPoolCreate(name="withdrawn", type="docker", base_job_template=template()))
    result = submit("withdrawn", "/request", "data-1 of run-1")
    withdraw(result.id)
    assert state_of(result.id).is_cancelled()


def test_a_run_whose_store_is_not_there_says_so_and_not_only_in_which_step_it_ended(
    server: str, client: SyncPrefectClient, s3: str, tmp_path: Path
) -> None:
    flow_id = client.create_flow_from_name(FLOW)
    deployment = client.create_deployment(
        flow_id,
        name="pulls",
        entrypoint="flows.stage.stage",
        path=".",
        parameter_openapi_schema=PARAMETERS,
        parameters={"request": "/x"},
        pull_steps=[{"tasks.run.workspace.project": {"id": "project", "remote": "s3://nowhere/dvc"}}],
    )
    flow_run = client.create_flow_run_from_deployment(deployment, state=Pending())
    variables = {
        "PREFECT__FLOW_RUN_ID": str(flow_run.id),
        "PREFECT_API_URL": server,
        "PYTHONPATH": str(ROOT),
        "RLHF_WORKSPACES": str(tmp_path),
        "RLHF_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "prefect.engine"],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.is_failed(), done.stderr
    assert "the bucket nowhere of the DVC remote s3://nowhere/dvc does not exist" in (state.message or "")
