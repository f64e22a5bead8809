"""DVC's view: whether a stage's outputs are valid, and their digests."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config.atomic_file import write_atomically
from config.dvc_stages import dvc_name, locked
from config.errors import EnvironmentFault
from config.yaml_text import yaml_content
from tasks.dvc.lock_digests import dvc_stage


class StageAtWork(EnvironmentFault):
    """Another process holds the files of a stage: it runs it or records it."""


def is_unchanged(root: Path, stage: str) -> bool:
    """Whether DVC finds inputs, parameters, code and outputs of `stage` as dvc.lock has them.

    Asked in process: the library takes 0.05 s where the command takes 0.7 s. Raises EnvironmentFault if DVC cannot
    tell.
    """
    with repo_about(root, stage) as repo:
        from dvc.repo import lock_repo

        with lock_repo(repo):
            return not status_of(dvc_stage(repo, root, stage))


def status_of(entry: Any) -> list[Any]:
    """As DVC's own `Stage.status`, without its table of readers and writers (.dvc/tmp/rwlock), where a process that is
    killed stays until nobody has its id. What trains holds the lock of the workspace.
    """
    changed: list[Any] = []
    for kind, items in (("changed deps", entry.deps), ("changed outs", entry.outs)):
        states: dict[str, Any] = {}
        for item in items:
            states |= item.status()
        if states:
            changed.append({kind: states})
    if entry.is_callback or entry.always_changed:
        changed.append("always changed")
    if entry.changed_stage():
        changed.append("changed command")
    return changed


@contextmanager
def repo_about(root: Path, stage: str) -> Iterator[Any]:
    """DVC's Repo, for questions about `stage`. Raises StageAtWork or EnvironmentFault if it cannot answer."""
    # imported late: half a second that a stopped or refused run should not pay
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            yield repo
    except LockError as error:
        raise StageAtWork(
            f"another process works on the files of {stage}: {one_line(error)} Wait for its end, or stop it."
        ) from None
    except DvcException as error:
        raise EnvironmentFault(
            f"DVC cannot check {stage}: {one_line(error)} See dvc status {dvc_name(stage)}."
        ) from None


def remove_from_lock(root: Path, stage: str) -> None:
    """Remove a stage from dvc.lock so that it runs again, for a source whose content is only known by reading it.

    Stages that read its outputs stay valid if they come out the same.
    """
    path = root / "dvc.lock"
    content = yaml_of(path)
    if content.get("stages", {}).pop(dvc_name(stage), None) is not None:
        write_atomically(path, yaml.safe_dump(content, sort_keys=False))


KEYS = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def environment(**extra: str) -> dict[str, str]:
    """Environment of child processes: this interpreter's folder comes first on PATH, so that `python` in dvc.yaml is
    this one.

    It has no keys of the servers: a stage reads data and models of others and needs no server.
    """
    variables = {name: value for name, value in os.environ.items() if name not in KEYS}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**variables, "PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1", **extra}


class Digests(NamedTuple):
    """Path -> DVC's content digest (a folder's ends in .dir: 36 characters)."""

    outs: dict[str, str]
    deps: dict[str, str]
    """Data and models the stage read; its code, and the digests of what is outside of the project, are left out."""


def digests(root: Path, stage: str) -> Digests:
    """A stage's entry in dvc.lock; empty if it never ran."""
    entry = locked(yaml_of(root / "dvc.lock"), stage)
    outs, deps = (
        {item["path"]: item["md5"] for item in entry.get(kind, []) if "md5" in item} for kind in ("outs", "deps")
    )
    read = {
        path: digest
        for path, digest in deps.items()
        if path.startswith(("data/", "models/")) and not path.startswith("data/inputs/")
    }
    return Digests(outs, read)


def yaml_of(path: Path) -> dict[str, Any]:
    """A YAML mapping, empty without the file."""
    try:
        content = yaml_content(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
