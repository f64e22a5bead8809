"""`rlhf up --docker` and `rlhf down --docker`: the stack of docker/compose.yaml, with each mistake reported before
anything starts.
"""

import os
import re
import subprocess
from pathlib import Path

from cli.project import project_root, this_command
from config.errors import EnvironmentFault

COMPOSE, SETTINGS, EXAMPLE = "docker/compose.yaml", "docker/.env", "docker/.env.example"
SECRETS = (
    "POSTGRES_PASSWORD",
    "PREFECT_KEY",
    "MLFLOW_PASSWORD",
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "S3_STAGE_ACCESS_KEY",
    "S3_STAGE_SECRET_KEY",
    "S3_MLFLOW_ACCESS_KEY",
    "S3_MLFLOW_SECRET_KEY",
)
SHORTEST_SECRET = 8
UP_TIMEOUT_SECONDS = 900


def up(gpu: bool, serve: bool) -> None:
    """Start the stack and print its pages. Raises EnvironmentFault for a missing engine, setting or image."""
    root = project_root()
    settings = read_settings(root / SETTINGS)
    require_engine()
    for name, default, target in (
        ("RLHF_ORCHESTRATOR_IMAGE", "rlhf-orchestrator:latest", "orchestrator"),
        ("RLHF_TRAIN_IMAGE", "rlhf-train:latest", "train"),
        ("RLHF_RETRAIN_IMAGE", "rlhf-retrain:latest", "retrain"),
    ):
        _require_image(settings.get(name) or default, name, target)
    print("Starting the stack ...", flush=True)
    profiles = [name for name, wanted in (("gpu", gpu), ("serve", serve)) if wanted]
    done = _compose(
        root,
        *(word for profile in profiles for word in ("--profile", profile)),
        "up",
        "--detach",
        "--remove-orphans",
        "--wait",
        "--wait-timeout",
        str(UP_TIMEOUT_SECONDS),
        *_awaited(gpu, serve),
    )
    if done.returncode:
        raise EnvironmentFault(_why(root, done.stderr))
    print(
        f"Prefect  http://127.0.0.1:{settings.get('PREFECT_PORT') or 4200}   (deployments, rlhf: "
        "the form that starts a run)"
    )
    print(f"MLflow   http://127.0.0.1:{settings.get('MLFLOW_PORT') or 5000}")
    if serve:
        print(f"Model    http://127.0.0.1:{settings.get('SERVE_PORT') or 8000}/v1")
        print(f"Its key  docker compose --file {COMPOSE} exec serve cat .rlhf/serve.key")
    print(f"Prefect asks for PREFECT_KEY, MLflow for rlhf and MLFLOW_PASSWORD: {SETTINGS}.")
    print(f"Stop it with {this_command()} down --docker; volumes keep what was made.")


def down() -> None:
    """Stop the stack; its volumes stay. Raises EnvironmentFault if that fails."""
    root = project_root()
    require_engine()
    done = _compose(root, "--profile", "gpu", "--profile", "serve", "down")
    if done.returncode:
        raise EnvironmentFault(_last_line(done.stderr))
    print("Stopped the stack. Its volumes stay: docker volume ls.")


def read_settings(path: Path) -> dict[str, str]:
    """The settings in docker/.env. Raises EnvironmentFault if the file or one of its secrets is missing; never shows a
    value.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise EnvironmentFault(
            f"{SETTINGS} does not exist, the stack takes its secrets from it. Make it: cp {EXAMPLE} {SETTINGS}"
        ) from None
    settings = dict(re.findall(r"^\s*(\w+)=(.*?)\s*$", "\n".join(lines), re.MULTILINE))
    for name in SECRETS:
        value = settings.get(name, "")
        if len(value) < SHORTEST_SECRET or not value.isalnum():
            state = (
                "empty"
                if not value
                else f"{len(value)} characters long"
                if value.isalnum()
                else "not of letters and digits alone"
            )
            raise EnvironmentFault(
                f"{name} in {SETTINGS} is {state}: at least {SHORTEST_SECRET} letters and digits "
                "are needed. Set it there."
            )
    return settings


def require_engine() -> None:
    """Raise EnvironmentFault unless a Docker engine answers."""
    host = os.environ.get("DOCKER_HOST", "the default socket")
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentFault(
            "docker is not on PATH, and the stack runs in containers. Install it, or use rlhf up without --docker."
        ) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(f"the Docker engine at {host} does not answer within 60 s. Restart it.") from None
    if done.returncode:
        raise EnvironmentFault(
            f"no Docker engine answers at {host}: {_last_line(done.stderr)} Start it, or name it with DOCKER_HOST."
        )


def _require_image(image: str, setting: str, target: str) -> None:
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=60, check=False).returncode:
        raise EnvironmentFault(
            f"the image {image} ({setting}) is not on this machine. Build it with make images "
            f"(target {target}), or name another in {SETTINGS}."
        )


def _compose(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--file", str(root / COMPOSE), "--env-file", str(root / SETTINGS), *arguments]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=UP_TIMEOUT_SECONDS + 60, check=False
    )


def _awaited(gpu: bool, serve: bool) -> list[str]:
    """Services to wait for. `setup` is left out: it exits by itself, which --wait takes for a failure."""
    return [
        "postgres",
        "s3",
        "prefect",
        "mlflow",
        "cpu-worker",
        "ray-worker",
        *(["ray-gpu-worker"] if gpu else []),
        *(["serve"] if serve else []),
    ]


def _why(root: Path, output: str) -> str:
    """The service's own error line if it has one: setup reports problems with store, secrets or recipe."""
    setup_lines = [
        line
        for line in _compose(root, "logs", "--no-log-prefix", "setup").stdout.splitlines()
        if line.startswith("setup: ")
    ]
    if setup_lines:
        return setup_lines[-1].removeprefix("setup: ")
    if "there is no champion yet" in _compose(root, "logs", "--tail", "20", "serve").stdout:
        return (
            "there is no champion to serve yet: name one with the deployment promote, then rlhf up "
            "--docker --serve again. The rest of the stack runs."
        )
    if "password authentication failed" in _compose(root, "logs", "--tail", "20", "postgres").stdout:
        return (
            f"PostgreSQL refuses POSTGRES_PASSWORD of {SETTINGS}: its volume was made with "
            "another. Put that one back, or change it in the "
            "database: docker compose exec postgres psql -U rlhf prefect -c '\\password'."
        )
    if "could not select device driver" in output:
        return "no GPU can be given to containers here: install the vendor's container toolkit, or leave --gpu out."
    return (
        f"the stack did not start: {_last_line(output)} See docker compose --file {COMPOSE} "
        f"--env-file {SETTINGS} logs."
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given."
