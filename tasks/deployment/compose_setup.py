"""Sets up the stack of docker/compose.yaml once its servers answer: buckets, credentials, the work pool of the flows,
deployments.

The service `setup` runs it at every start; existing objects are kept or updated.
"""

import logging
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolUpdate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from config.errors import EnvironmentFault, RlhfError
from config.load import load
from config.schema import Params
from tasks.deployment.automations import follow_lives
from tasks.deployment.deployments import keep_schedule_switches, make_pool, prefect_file
from tasks.run.store import StoreFaults
from tasks.run.workspace import HOME
from tasks.servers.plans import POOL

logger = logging.getLogger(__name__)

NODES = "cpu"
"""Pool of stages: the label of the Ray nodes that are always there."""
COMMAND = "python -m prefect.engine"
CREDENTIALS, TOKEN = Path("/run/rlhf/aws"), Path("/run/rlhf/ray")
"""Files in a read-only volume of the workers; no secret is in a work pool, a parameter or a log."""


def set_up(environment: Mapping[str, str]) -> None:
    """Buckets, credentials, pool, deployments and the end of silent runs, of the stack that `environment` describes.
    Raises EnvironmentFault, ParamsError.
    """
    _write_credentials(environment)
    for name in ("RLHF_REMOTE", "MLFLOW_ARTIFACTS_DESTINATION"):  # a role each, a bucket each
        _make_bucket(environment[name])
    with get_client(sync_client=True) as client:
        make_pool(client, pipeline_template())
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=pipeline_template()))  # of an earlier version
        _deploy(client, environment)
        follow_lives(client)


def pipeline_template() -> dict[str, Any]:
    """The job template of the pipelines' pool: Prefect's own for processes, with a fixed command and folder."""
    template = ProcessWorker.get_default_base_job_template()
    template["job_configuration"] |= {"command": COMMAND, "working_dir": str(HOME)}
    for name in ("command", "working_dir"):
        del template["variables"]["properties"][name]
    return template


def placed(params: Params, pool: str, tracking_uri: str, here: Collection[str] = ()) -> dict[str, Any]:
    """Params that prefill a form: every stage but those of `here` on `pool`, tracked by the stack's MLflow."""
    content = params.model_dump(mode="json")
    where = {stage: {**place} for stage, place in content["where"].items()}
    for place in where.values():
        place.pop("pool", None)
    where["default"]["pool"] = pool
    for stage in here:
        where.setdefault(stage, {})["pool"] = "local"
    content["where"] = where
    content["tracking"]["uri"] = tracking_uri
    return content


def _write_credentials(environment: Mapping[str, str]) -> None:
    """The keys of pipelines and stages, and the token of the Ray cluster, readable by the images' user alone."""
    missing = [name for name in ("S3_STAGE_ACCESS_KEY", "S3_STAGE_SECRET_KEY") if not environment.get(name)]
    if missing:
        raise EnvironmentFault(
            f"{' and '.join(missing)} not set: pipelines and stages have keys of their own, not "
            "the store's root. Set S3_STAGE_ACCESS_KEY and S3_STAGE_SECRET_KEY in docker/.env."
        )
    text = (
        f"[default]\naws_access_key_id = {environment['S3_STAGE_ACCESS_KEY']}\n"
        f"aws_secret_access_key = {environment['S3_STAGE_SECRET_KEY']}\n"
    )
    _write_secret(CREDENTIALS, text)
    if not TOKEN.exists():
        _write_secret(TOKEN, secrets.token_hex(32))


def _write_secret(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o400)
    temporary.chmod(0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o400)
    os.chown(temporary, 1000, 1000)
    temporary.replace(path)


def _make_bucket(remote: str) -> None:
    bucket = remote.removeprefix("s3://").split("/")[0]
    with StoreFaults(remote):
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        if not files.exists(bucket):
            files.mkdir(bucket)
        files.pipe_file(f"{bucket}/.rlhf", b"written by the stack at its start, to see that it can be\n")


def _deploy(client: SyncPrefectClient, environment: Mapping[str, str]) -> None:
    """The flows of prefect.yaml. Schedules enabled or disabled in the UI stay so."""
    recipe = environment.get("RLHF_RECIPE") or "recipes/demo.yaml"
    params = load(HOME / recipe)
    deployments = {deployment.name: deployment for deployment in client.read_deployments()}
    for described in prefect_file(HOME)["deployments"]:
        name = str(described["name"])
        options = deployment(described, params, environment)
        client.create_deployment(
            client.create_flow_from_name(name),
            **options,
            work_pool_name=POOL,
            work_queue_name=described["work_pool"]["work_queue_name"],
            pull_steps=pull_steps(environment["RLHF_REMOTE"]),
        )
        keep_schedule_switches(client, deployments.get(name))


def deployment(described: Mapping[str, Any], params: Params, environment: Mapping[str, str]) -> dict[str, Any]:
    """Fields of an entry of prefect.yaml for Prefect, beside pool and workspace."""
    uri = environment["MLFLOW_TRACKING_URI"]
    # the project's own votes and files are where its worker is, and on no node
    forms = {"{{ project.params }}": placed(params, NODES, uri, ("data",))}
    parameters = {name: forms.get(str(value), value) for name, value in described["parameters"].items()}
    limit = described.get("concurrency_limit")
    fields: dict[str, Any] = {
        "name": described["name"],
        "entrypoint": described["entrypoint"],
        "path": ".",
        "parameters": parameters,
        "parameter_openapi_schema": parameter_schema(
            load_flow_from_entrypoint(described["entrypoint"])
        ).model_dump_for_openapi(),
        "enforce_parameter_schema": False,
        "tags": described["tags"],
        "description": described["description"].strip(),
        "schedules": [schedule(entry) for entry in described.get("schedules", [])],
    }
    if limit:
        fields |= {
            "concurrency_limit": limit["limit"],
            "concurrency_options": ConcurrencyOptions(collision_strategy=limit["collision_strategy"]),
        }
    return fields


def schedule(described: Mapping[str, Any]) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        slug=described["slug"],
        active=described["active"],
        schedule=CronSchedule(cron=described["cron"], timezone=described["timezone"]),
    )


def pull_steps(remote: str) -> list[dict[str, Any]]:
    """Runs work in the project's workspace, one at a time."""
    return [
        {"tasks.run.workspace.project": {"id": "workspace", "remote": remote}},
        {"prefect.deployments.steps.set_working_directory": {"directory": "{{ workspace.directory }}"}},
    ]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        set_up(os.environ)
    except RlhfError as error:
        sys.stderr.write(f"setup: {error}\n")
        sys.exit(error.exit_code)
    logger.info("buckets, credentials and deployments are in place")
