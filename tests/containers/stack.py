"""A stack of docker/compose.yaml for tests, on an engine that is there: images, free ports, secrets of its own, gone
afterwards.
"""

import base64
import json
import os
import re
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import boto3

from cli.docker import SECRETS
from config.ports import free_port
from tests.conftest import ROOT

PROJECT = "rlhf-test"
TINY = "tests/e2e/tiny.yaml"
BUILD_SECONDS, UP_SECONDS = 3000, 900
ASK_TRIES = 6
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def docker(
    *arguments: str, timeout: float = 600, check: bool = True, environment: dict[str, str] | None = None
) -> str:
    """What docker prints."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, f"docker {' '.join(arguments[:4])}: {done.stderr[-3000:]}"
    return done.stdout


def has_engine() -> bool:
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def status(url: str, login: str = "", host: str = "") -> int:
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
    headers |= {"Host": host} if host else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def can_be_had(image: str) -> bool:
    """Whether the engine has it, or a registry that the engine reaches."""
    return any(
        subprocess.run(["docker", *how, image], capture_output=True, timeout=600, check=False).returncode == 0
        for how in (("image", "inspect"), ("pull", "--quiet"))
    )


def pinned(path: str, pattern: str) -> str:
    """The image that a file names with its digest; where that cannot be had, what the engine has under the tag."""
    outcome = re.search(pattern, (ROOT / path).read_text())
    assert outcome, f"{path} pins no {pattern}"
    return outcome[1] if can_be_had(outcome[1]) else outcome[1].split("@")[0]


def build_images() -> dict[str, str]:
    """Name -> image. Layers that are there are used again. The store is built from a package index where its image
    cannot be had.
    """
    base = pinned("docker/Dockerfile", r"ARG BASE=(\S+@sha256:\w+)")
    images = {target: f"rlhf-{target}:test" for target in ("orchestrator", "train", "retrain")}
    for target, image in images.items():
        _build("docker/Dockerfile", ".", image, base, "--target", target)
    images["postgres"] = pinned("docker/compose.yaml", r"(postgres:15@sha256:\w+)")
    images["store"] = pinned("docker/compose.yaml", r"(chrislusf/seaweedfs:\S+@sha256:\w+)")
    if not can_be_had(images["store"]):
        images["store"] = "rlhf-store:test"
        folder = "tests/containers"
        _build(f"{folder}/store.Dockerfile", folder, images["store"], base)
    return {**images, "base": base}


def _build(file: str, context: str, image: str, base: str, *options: str) -> None:
    docker(
        "build",
        "--quiet",
        "--file",
        file,
        "--tag",
        image,
        "--build-arg",
        f"BASE={base}",
        *options,
        context,
        timeout=BUILD_SECONDS,
    )


class Stack:
    """The running stack."""

    def __init__(self, images: dict[str, str], folder: Path) -> None:
        ports = [free_port() for _ in range(4)]
        self.prefect, self.mlflow, self.s3, self.model = (f"http://127.0.0.1:{port}" for port in ports)
        self.secrets = {name: secrets.token_hex(12) for name in SECRETS}
        self._settings = folder / "env"
        self._settings.write_text(
            "".join(
                f"{name}={value}\n"
                for name, value in {
                    **self.secrets,
                    "S3_IMAGE": images["store"],
                    "POSTGRES_IMAGE": images["postgres"],
                    "RLHF_ORCHESTRATOR_IMAGE": images["orchestrator"],
                    "RLHF_TRAIN_IMAGE": images["train"],
                    "RLHF_RETRAIN_IMAGE": images["retrain"],
                    "PREFECT_PORT": ports[0],
                    "MLFLOW_PORT": ports[1],
                    "S3_PORT": ports[2],
                    "SERVE_PORT": ports[3],
                    "OMP_NUM_THREADS": 1,
                    "COMPOSE_PROJECT_NAME": PROJECT,
                }.items()
            )
        )
        self._settings.chmod(0o600)

    def compose(self, *arguments: str, timeout: float = UP_SECONDS, check: bool = True) -> str:
        files = ["--file", "docker/compose.yaml", "--file", "tests/containers/compose.yaml"]
        return docker(
            "compose",
            "--env-file",
            str(self._settings),
            "--project-name",
            PROJECT,
            *files,
            *arguments,
            timeout=timeout,
            check=check,
        )

    def up(self) -> None:
        scale = ("--scale", f"ray-worker={NODES}")
        self.compose("up", "--detach", "--wait", "--wait-timeout", str(UP_SECONDS - 30), *scale, *SERVICES)

    def down(self) -> None:
        self.compose("--profile", "serve", "down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """The answer of Prefect's API."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._login()}
        if data is not None or method not in (None, "GET"):
            headers |= self._csrf_token()
        request = urllib.request.Request(f"{self.prefect}/api{path}", method=method, headers=headers)
        for _ in range(ASK_TRIES):
            try:
                with urllib.request.urlopen(request, data=data, timeout=60) as answer:
                    content = answer.read()
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:  # a busy database: the server says 500, and has done nothing
                if error.code < 500:
                    raise
                time.sleep(5)
        raise AssertionError(
            f"Prefect's API did not answer {path} in {ASK_TRIES} tries: "
            f"{self.compose('logs', '--tail', '40', 'prefect', check=False)}"
        )

    def _login(self) -> dict[str, str]:
        key = base64.b64encode(self.secrets["PREFECT_KEY"].encode()).decode()
        return {"Authorization": f"Basic {key}"}

    def _csrf_token(self) -> dict[str, str]:
        client = "tests"
        request = urllib.request.Request(f"{self.prefect}/api/csrf-token?client={client}", headers=self._login())
        with urllib.request.urlopen(request, timeout=60) as answer:
            token = json.loads(answer.read())["token"]
        return {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": token}

    def start_run(self, params: dict[str, Any]) -> str:
        """Id of a new run of the pipeline, as the form starts it."""
        return self.start("rlhf/rlhf", {"params": params})

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Id of a new run of `flow/deployment`."""
        deployment_id = self.ask(f"/deployments/name/{deployment}")["id"]
        result = self.ask(f"/deployments/{deployment_id}/create_flow_run", {"parameters": parameters})
        return str(result["id"])

    def state(self, flow_run: str) -> dict[str, Any]:
        return dict(self.ask(f"/flow_runs/{flow_run}")["state"])

    def await_end(self, flow_run: str, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (state := self.state(flow_run))["type"] not in FINAL:
            assert time.monotonic() < deadline, f"{flow_run} is still {state['name']}: {self.logs()}"
            time.sleep(3)
        return state

    def logs(self) -> str:
        """The newest lines of the workers."""
        return self.compose("logs", "--tail", "60", "cpu-worker", "ray-worker", check=False)

    def store(self) -> Any:
        """A client of the store."""
        return boto3.client(
            "s3",
            endpoint_url=self.s3,
            aws_access_key_id=self.secrets["S3_ACCESS_KEY"],
            aws_secret_access_key=self.secrets["S3_SECRET_KEY"],
            region_name="us-east-1",
        )

    def objects(self, prefix: str = "", bucket: str = "rlhf") -> list[str]:
        pages = self.store().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def nodes_of(self, stage: str) -> list[str]:
        """Containers in which processes of a stage are running."""
        look = f"grep -qsa training.{stage} /proc/[0-9]*/cmdline && echo runs"
        nodes = self.compose("ps", "--quiet", "ray-worker").split()
        return [node for node in nodes if docker("exec", node, "sh", "-c", look, check=False)]


NODES = 2
"""Containers that run stages."""
SERVICES = ("postgres", "s3", "prefect", "mlflow", "cpu-worker", "ray-worker")
