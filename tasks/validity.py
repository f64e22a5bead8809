"""What DVC knows: whether a stage's outputs are still good, what they contain, and how they reach the remote."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

from config.errors import EnvironmentFault
from tasks.run import STATE_FOLDER


def is_unchanged(root: Path, stage: str) -> bool:
    """Whether DVC finds inputs, parameters, code and outputs of `stage` as dvc.lock has them.

    Asked in process: the library takes 0.05 s where the command takes 0.7 s. Raises EnvironmentFault if DVC can not tell.
    """
    from dvc.exceptions import DvcException  # imported late: half a second that a stopped or refused run need not pay
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            # a bare stage name would be looked up in the current folder's dvc.yaml, whatever the repo
            return not repo.status(targets=[f"{root.resolve() / 'dvc.yaml'}:{stage}"])
    except DvcException as error:
        raise EnvironmentFault(f"DVC can not tell whether {stage} changed: {_one_line(error)} See dvc status {stage}.") from None


def repro_command(stage: str) -> list[str]:
    """The command that brings one stage up to date, whatever is before it in the pipeline."""
    return [sys.executable, "-m", "dvc", "repro", "--single-item", stage]


def environment(**extra: str) -> dict[str, str]:
    """For child processes: this interpreter's folder comes first, so that `python` in dvc.yaml is this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1", **extra}


class Digests(NamedTuple):
    """Path -> DVC's content digest (a folder's ends in .dir: 36 characters)."""

    outs: dict[str, str]
    deps: dict[str, str]
    """Data and models the stage read; its code, and the digests of what is outside of the project, are left out."""


def digests(root: Path, stage: str) -> Digests:
    """What dvc.lock says about a stage; nothing if it was never run."""
    try:
        lock = yaml.safe_load((root / "dvc.lock").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Digests({}, {})
    entry = lock.get("stages", {}).get(stage, {})
    outs, deps = ({item["path"]: item["md5"] for item in entry.get(kind, []) if "md5" in item} for kind in ("outs", "deps"))
    read = {path: digest for path, digest in deps.items() if path.startswith(("data/", "models/")) and not path.startswith("data/inputs/")}
    return Digests(outs, read)


def push(root: Path, timeout_seconds: float = 600) -> str | None:
    """Send new outputs to the default remote; returns in one line why it could not, None if all is there or there is no remote.

    What was pushed is remembered by the digest of dvc.lock, so that an unchanged run asks nobody.
    """
    lock, marker = root / "dvc.lock", root / STATE_FOLDER / "pushed"
    if not lock.exists() or default_remote(root) is None:
        return None
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if marker.exists() and marker.read_text() == digest:
        return None
    command = [sys.executable, "-m", "dvc", "push", "--quiet"]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"dvc push took more than {timeout_seconds:.0f} s and was given up. Run dvc push to send the outputs to the remote."
    if done.returncode:
        return f"dvc push failed: {_last_error(done.stderr)} The run is complete here; run dvc push to send its outputs to the remote."
    marker.write_text(digest)
    return None


def default_remote(root: Path) -> str | None:
    """URL of the default remote, None if there is none."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    name = config["core"].get("remote")
    return str(config["remote"][name]["url"]) if name in config["remote"] else None


def error_line(text: str) -> str | None:
    """The first thing that DVC itself called an error in what it printed."""
    return next((line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR: ")), None)


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _full_stop(error_line(text) or (lines[-1].strip() if lines else "no reason given"))


def _one_line(error: Exception) -> str:
    return _full_stop(" ".join(str(error).split()))


def _full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
