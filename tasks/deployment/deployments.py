"""Deploys prefect.yaml to a running server: the work pool with its queues, and a deployment of each flow.

A deployed run works in the checkout that `rlhf up` was started in. Training runs share the queue `training`, which
lets as many run at once as there are slots; the others wait in the order they came.
"""

import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkPoolStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from config.errors import EnvironmentFault
from config.load import load
from config.schema import Params
from config.yaml_text import yaml_content
from tasks.deployment.automations import automate
from tasks.servers.plans import POOL

TRAINING_QUEUE = "training"
SLOTS = 1
"""Training runs at once: there is one workspace, and on a CPU runs only slow each other down."""
PREFECT_FILE = "prefect.yaml"
DEPLOY_TIMEOUT_SECONDS = 300.0
WORKER_PATIENCE_SECONDS = 120.0


class Deployed(NamedTuple):
    name: str
    """flow/deployment."""
    url: str
    """Its page; `<url>/run` is the form."""
    scheduled: bool
    """Whether it has an active schedule."""


def project(recipe: str) -> dict[str, Any]:
    """A build step of prefect.yaml: what its templates say about this checkout, and the params that prefill the forms.

    Raises ParamsError if the recipe is not valid.
    """
    root = Path.cwd()
    params = load(root / recipe).model_dump(mode="json")
    return {
        "root": str(root),
        "python": shlex.quote(sys.executable),
        "params": params,
        "version": version(root, params),
    }


def version(root: Path, params: dict[str, Any]) -> str:
    """A digest that changes with everything in a deployment: prefect.yaml, the recipe, the schema, the flows, the
    place of checkout and interpreter.
    """
    parts = [
        str(root.resolve()),
        sys.executable,
        json.dumps(params),
        json.dumps(Params.model_json_schema()),
        (root / PREFECT_FILE).read_text(),
    ]
    parts += [path.read_text(encoding="utf-8") for path in sorted((root / "flows").glob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def deploy(root: Path, webhook_url: str | None = None) -> list[Deployed]:
    """Create or update the pool, its queues, every deployment and the automations.

    Schedules enabled or disabled in the UI stay so. The Prefect settings of this process name the server. Raises
    EnvironmentFault if Prefect refuses prefect.yaml, ParamsError if its recipe is not valid.
    """
    content = prefect_file(root)
    with get_client(sync_client=True) as client:
        make_pool(client, ProcessWorker.get_default_base_job_template())
        before = _existing(client, content)
        wanted = version(root, load(root / _recipe(content)).model_dump(mode="json"))
        if any(deployment is None or deployment.version != wanted for deployment in before.values()):
            _prefect_deploy(root)
            for old in before.values():
                keep_schedule_switches(client, old)
        automate(client, webhook_url)
        return [
            _deployed(client, deployment)
            for deployment in _existing(client, content).values()
            if deployment is not None
        ]


def await_worker() -> None:
    """Wait until a worker polls the pool. Raises EnvironmentFault if none does."""
    deadline = time.monotonic() + WORKER_PATIENCE_SECONDS
    with get_client(sync_client=True) as client:
        while client.read_work_pool(POOL).status != WorkPoolStatus.READY:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"the worker did not poll for runs within {WORKER_PATIENCE_SECONDS:.0f} s. Why "
                    "is in .rlhf/logs/worker.log; try rlhf up again."
                )
            time.sleep(0.2)


def prefect_file(root: Path) -> dict[str, Any]:
    """The content of prefect.yaml. Raises EnvironmentFault if it cannot be read."""
    path = root / PREFECT_FILE
    try:
        return dict(yaml_content(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise EnvironmentFault(
            f"{path} cannot be read: {' '.join(str(error).split())}. Fix it, or take it back from git."
        ) from None


def _recipe(content: dict[str, Any]) -> str:
    """The recipe that the build step is given."""
    steps = [
        arguments
        for step in content.get("build") or []
        for name, arguments in step.items()
        if name.endswith(".project")
    ]
    if not steps:
        raise EnvironmentFault(
            f"{PREFECT_FILE} has no build step tasks.deployment.deployments.project, which names "
            "the recipe of the forms. Put it back."
        )
    return str(steps[0]["recipe"])


def make_pool(client: SyncPrefectClient, template: dict[str, Any]) -> None:
    """The work pool and its queue for training; existing settings are kept."""
    description = "Runs in the project, each as a process of its worker."
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", description=description, base_job_template=template)
        )
    try:
        client.read_work_queue_by_name(TRAINING_QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        client.create_work_queue(
            TRAINING_QUEUE,
            description="Training runs: one a slot, the others wait in order.",
            concurrency_limit=SLOTS,
            work_pool_name=POOL,
        )


def _existing(client: SyncPrefectClient, content: dict[str, Any]) -> dict[str, DeploymentResponse | None]:
    """Deployment of prefect.yaml -> what the server has of that name."""
    deployments = {deployment.name: deployment for deployment in client.read_deployments()}
    return {str(entry["name"]): deployments.get(str(entry["name"])) for entry in content["deployments"]}


def _prefect_deploy(root: Path) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DEPLOY_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"prefect deploy took more than {DEPLOY_TIMEOUT_SECONDS:.0f} s. Is the machine "
            "overloaded? Try rlhf up again."
        ) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" ╭╮╰╯─│")]
        raise EnvironmentFault(
            f"Prefect does not take {root / PREFECT_FILE}: {lines[-1] if lines else f'exit code {done.returncode}'}"
        )


def keep_schedule_switches(client: SyncPrefectClient, old: DeploymentResponse | None) -> None:
    """A deployment that was made anew starts with the schedules of prefect.yaml; those that were there before, `old`,
    stay on or off as they were.
    """
    if old is None:
        return
    switched = {schedule.slug: schedule.active for schedule in old.schedules if schedule.slug}
    for schedule in client.read_deployment_schedules(old.id):
        if schedule.slug in switched and schedule.active != switched[schedule.slug]:
            client.update_deployment_schedule(old.id, schedule.id, active=switched[schedule.slug])


def _deployed(client: SyncPrefectClient, deployment: DeploymentResponse) -> Deployed:
    flow = client.read_flow(deployment.flow_id)
    page = str(client.api_url).rstrip("/").removesuffix("/api")
    return Deployed(
        f"{flow.name}/{deployment.name}",
        f"{page}/deployments/deployment/{deployment.id}",
        any(schedule.active for schedule in deployment.schedules),
    )
