"""Makes the stack of docker/compose.yaml ready once its servers answer: bucket, credentials, work
pools, the deployment.

Run by the service `setup`, again at every start; what is there already stays as it is or is brought
up to date.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from config.errors import EnvironmentFault, RlhfError
from config.load import load
from config.schema import Params
from tasks.deployment.automations import end_silent_runs
from tasks.run.code_version import HOME
from tasks.run.exchange import StoreFaults

logger = logging.getLogger(__name__)

PIPELINES = "cpu"
"""Pool of the pipelines: processes of the CPU worker."""
CONTAINERS, GPU_CONTAINERS = "docker", "docker-gpu"
"""Pools of the stages."""
COMMAND = "python -m prefect.engine"
TEMPLATE = HOME / "docker" / "pools" / "docker.json"
CREDENTIALS = Path("/run/rlhf/aws")
"""A file of a volume that workers and stages mount read-only; nothing secret is in a work pool, a
parameter or a log.
"""


def set_up(environment: Mapping[str, str]) -> None:
    """Bucket, credentials, pools, deployment and the end of silent runs, of the stack that
    `environment` describes. Raises EnvironmentFault, ParamsError.
    """
    _write_credentials(environment)
    _make_bucket(environment["RLHF_REMOTE"])
    with get_client(sync_client=True) as client:
        _pool(client, PIPELINES, "process", pipeline_template())
        _pool(client, CONTAINERS, "docker", container_template(environment, gpus=False))
        _pool(client, GPU_CONTAINERS, "docker", container_template(environment, gpus=True))
        _deploy(client, environment)
        end_silent_runs(client)


def pipeline_template() -> dict[str, Any]:
    """The job template of the pipelines' pool: Prefect's own for processes, with a command and a
    folder that no run can change.
    """
    template = ProcessWorker.get_default_base_job_template()
    template["job_configuration"] |= {"command": COMMAND, "working_dir": str(HOME)}
    for name in ("command", "working_dir"):
        del template["variables"]["properties"][name]
    return template


def container_template(environment: Mapping[str, str], gpus: bool) -> dict[str, Any]:
    """The job template of a pool of stage containers: image, network, memory as fields; volumes,
    and GPUs as device requests, in no field.
    """
    template: dict[str, Any] = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    job = template["job_configuration"]
    job["volumes"] = [
        f"{environment['RLHF_CACHE_VOLUME']}:/cache",
        f"{environment['RLHF_CREDENTIALS_VOLUME']}:{CREDENTIALS.parent}:ro",
    ]
    job["networks"] = [environment["RLHF_NETWORK"]]
    job["network_mode"] = None
    defaults: dict[str, Any] = {
        "image": environment["RLHF_TRAIN_IMAGE"],
        "mem_limit": environment.get("RLHF_STAGE_MEMORY") or None,
        "env": {
            "AWS_SHARED_CREDENTIALS_FILE": str(CREDENTIALS),
            "AWS_ENDPOINT_URL": environment["AWS_ENDPOINT_URL"],
            "AWS_DEFAULT_REGION": environment["AWS_DEFAULT_REGION"],
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or None,
        },
    }
    fields = template["variables"]["properties"]
    for name, value in defaults.items():
        fields[name]["default"] = value
    for name in ("networks", "network_mode"):
        del fields[name]
    if gpus:
        job["container_create_kwargs"]["device_requests"] = [
            {"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}
        ]
    return template


def placed(params: Params, pool: str, tracking_uri: str) -> dict[str, Any]:
    """`params` with every stage on `pool`, remembered by the stack's MLflow: what the form is
    prefilled with.
    """
    content = params.model_dump(mode="json")
    where = {stage: {**place} for stage, place in content["where"].items()}
    for place in where.values():
        place.pop("pool", None)
    where["default"]["pool"] = pool
    content["where"] = where
    content["tracking"]["uri"] = tracking_uri
    return content


def _write_credentials(environment: Mapping[str, str]) -> None:
    """The keys of pipelines and stages, readable by the images' user alone."""
    missing = [
        name for name in ("S3_STAGE_ACCESS_KEY", "S3_STAGE_SECRET_KEY") if not environment.get(name)
    ]
    if missing:
        raise EnvironmentFault(
            f"{' and '.join(missing)} not set: pipelines and stages have keys of their own, not "
            "the store's root. Set S3_STAGE_ACCESS_KEY and S3_STAGE_SECRET_KEY in docker/.env."
        )
    text = (
        f"[default]\naws_access_key_id = {environment['S3_STAGE_ACCESS_KEY']}\n"
        f"aws_secret_access_key = {environment['S3_STAGE_SECRET_KEY']}\n"
    )
    temporary = CREDENTIALS.with_name(".aws.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o400)
    temporary.chmod(0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o400)
    os.chown(temporary, 1000, 1000)
    temporary.replace(CREDENTIALS)


def _make_bucket(remote: str) -> None:
    bucket = remote.removeprefix("s3://").split("/")[0]
    with StoreFaults(remote):
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        if not files.exists(bucket):
            files.mkdir(bucket)
        files.pipe_file(
            f"{bucket}/.rlhf", b"written by the stack at its start, to see that it can be\n"
        )


def _pool(client: Any, name: str, kind: str, template: dict[str, Any]) -> None:
    """Templates follow the code and .env at every start; what else somebody set in the UI stays."""
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))
        return
    client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))


def _deploy(client: Any, environment: Mapping[str, str]) -> None:
    """The flow rlhf, each run in a workspace of its own."""
    recipe = environment.get("RLHF_RECIPE") or "recipes/demo.yaml"
    params = placed(load(HOME / recipe), CONTAINERS, environment["MLFLOW_TRACKING_URI"])
    client.create_deployment(
        client.create_flow_from_name("rlhf"),
        name="rlhf",
        work_pool_name=PIPELINES,
        entrypoint="flows.rlhf.rlhf",
        path=".",
        parameters={"params": params},
        parameter_openapi_schema={
            "type": "object",
            "properties": {"params": Params.model_json_schema()},
        },
        enforce_parameter_schema=False,
        tags=["rlhf", "training"],
        description="Train, align and evaluate a model, each stage in a container of its own. Only "
        "what changed since the last run is done again.",
        pull_steps=[
            {"tasks.run.workspace.own": {"id": "own", "remote": environment["RLHF_REMOTE"]}},
            {
                "prefect.deployments.steps.set_working_directory": {
                    "directory": "{{ own.directory }}"
                }
            },
        ],
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        set_up(os.environ)
    except RlhfError as error:
        sys.stderr.write(f"setup: {error}\n")
        sys.exit(error.exit_code)
    logger.info("bucket, credentials, work pools and deployment are in place")
