"""DVC's view: whether a stage's outputs are valid, their digests, and pushing them to the
remote.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config.atomic_file import write_atomically
from config.differences import value_at
from config.dvc_stages import defined, dvc_name, locked
from config.errors import EnvironmentFault
from config.inputs import outdated_digests
from config.records import STAGES
from config.schema import Params
from config.sections.where import LOCAL
from tasks.dvc.lock_digests import changes_by_lock, dvc_stage
from tasks.run.run import STATE_FOLDER
from tasks.run.transient import fault, kind_of


class StageAtWork(EnvironmentFault):
    """Another process holds the files of a stage: it runs it or records it."""


def is_unchanged(root: Path, stage: str) -> bool:
    """Whether DVC finds inputs, parameters, code and outputs of `stage` as dvc.lock has them.

    Asked in process: the library takes 0.05 s where the command takes 0.7 s. Raises
    EnvironmentFault if DVC cannot tell.
    """
    with repo_about(root, stage) as repo:
        return not changes(repo, root, stage)


def changes(repo: Any, root: Path, stage: str) -> list[Any]:
    """DVC's account of what changed, as in [{'changed outs': {'models/sft': 'deleted'}}, 'changed
    command']; empty if nothing did.
    """
    from dvc.repo import lock_repo

    with lock_repo(repo):
        return status_of(dvc_stage(repo, root, stage))


def status_of(entry: Any) -> list[Any]:
    """As DVC's own `Stage.status`, without its table of readers and writers (.dvc/tmp/rwlock),
    where a process that is killed stays until nobody has its id. What trains holds the lock of the
    workspace.
    """
    found: list[Any] = []
    for kind, items in (("changed deps", entry.deps), ("changed outs", entry.outs)):
        states: dict[str, Any] = {}
        for item in items:
            states |= item.status()
        if states:
            found.append({kind: states})
    if entry.is_callback or entry.always_changed:
        found.append("always changed")
    if entry.changed_stage():
        found.append("changed command")
    return found


@contextmanager
def repo_about(root: Path, stage: str) -> Iterator[Any]:
    """DVC's Repo, to ask it about `stage`. Raises StageAtWork or EnvironmentFault for what it
    cannot tell.
    """
    from dvc.exceptions import (
        DvcException,  # imported late: half a second that a stopped or refused run should not pay
    )
    from dvc.lock import LockError
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            yield repo
    except LockError as error:
        raise StageAtWork(
            f"another process works on the files of {stage}: {_one_line(error)} Wait for its end, "
            "or stop it."
        ) from None
    except DvcException as error:
        raise EnvironmentFault(
            f"DVC cannot check {stage}: {_one_line(error)} See dvc status {dvc_name(stage)}."
        ) from None


def stale_stages(root: Path, params: Params, stages: Sequence[str]) -> list[str]:
    """Which of `stages`, in their order, a run with `params` would do again; nothing is written,
    not even params.yaml.

    A stage counts as stale if it reads outputs of a stale one, which may turn out the same. So does
    one that a killed run left running. Raises EnvironmentFault if DVC cannot tell.
    """
    pipeline, lock = defined(root), yaml_of(root / "dvc.lock")
    wanted = params.model_dump(mode="json")
    changing = {str(path) for path in outdated_digests(root, params)}
    stale = []
    elsewhere = any(params.where.of(stage).pool != LOCAL for stage in STAGES)
    for stage in stages:
        if stage not in pipeline:
            continue
        entry = locked(lock, stage)
        recorded = entry.get("params", {}).get("params.yaml", {})
        reads = {item["path"] for item in entry.get("deps", [])}
        named = [key for key in pipeline[stage].get("params", []) if isinstance(key, str)]
        same = (
            bool(entry)
            and set(named) == set(recorded)
            and all(value_at(wanted, key) == value for key, value in recorded.items())
        )
        if not same or reads & changing or _changed_files(root, stage, by_lock=elsewhere):
            stale.append(stage)
            changing |= {
                str(out if isinstance(out, str) else next(iter(out)))
                for kind in ("outs", "metrics", "plots")
                for out in pipeline[stage].get(kind, [])
            }
    return stale


def _changed_files(root: Path, stage: str, by_lock: bool = False) -> bool:
    """Whether DVC finds anything changed but parameters; `by_lock`: outputs are what dvc.lock says,
    wherever they lie.
    """
    try:
        with repo_about(root, stage) as repo:
            found = changes(repo, root, stage)
            counted = changes_by_lock(repo, root, stage, found) if by_lock else found
    except StageAtWork:
        return True
    files = [
        path
        for change in counted
        if isinstance(change, dict)
        for kind in change.values()
        for path in kind
        if path != "params.yaml"
    ]
    return bool(files) or any(isinstance(change, str) for change in counted)


def forget(root: Path, stage: str) -> None:
    """Take a stage out of dvc.lock, so that it is run again whatever DVC knows: for a source whose
    content only reading tells.

    What reads its outputs stays as it is if they come out the same.
    """
    path = root / "dvc.lock"
    content = yaml_of(path)
    if content.get("stages", {}).pop(dvc_name(stage), None) is not None:
        write_atomically(path, yaml.safe_dump(content, sort_keys=False))


KEYS = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def environment(**extra: str) -> dict[str, str]:
    """Environment of child processes: this interpreter's folder comes first on PATH, so that
    `python` in dvc.yaml is this one.

    It has no keys of the servers: a stage reads data and models of others and needs no server.
    """
    own = {name: value for name, value in os.environ.items() if name not in KEYS}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**own, "PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1", **extra}


def run_dvc(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `dvc ARGUMENTS` in a separate process; returns its output."""
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=root,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


class Digests(NamedTuple):
    """Path -> DVC's content digest (a folder's ends in .dir: 36 characters)."""

    outs: dict[str, str]
    deps: dict[str, str]
    """Data and models the stage read; its code, and the digests of what is outside of the project,
    are left out.
    """


def digests(root: Path, stage: str) -> Digests:
    """A stage's entry in dvc.lock; empty if it never ran."""
    entry = locked(yaml_of(root / "dvc.lock"), stage)
    outs, deps = (
        {item["path"]: item["md5"] for item in entry.get(kind, []) if "md5" in item}
        for kind in ("outs", "deps")
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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def push(root: Path, stage: str | None = None) -> str | None:
    """As `send_outputs`; returns in one line why it could not, None if all is there or there is no
    remote.
    """
    try:
        send_outputs(root, stage)
    except EnvironmentFault as met:
        return str(met)
    return None


def send_outputs(root: Path, stage: str | None = None) -> None:
    """Push new outputs (of `stage`, or all) to the default remote, if there is one, without a time
    limit.

    Pushes are remembered by the digest of dvc.lock and by the remote, so that an unchanged run
    makes no request. Raises TransientFault, EnvironmentFault or UnknownFault: see
    tasks/run/transient.py.
    """
    lock, marker = root / "dvc.lock", root / STATE_FOLDER / "pushed"
    if not lock.exists() or default_remote(root) is None:
        return
    if marker.exists() and marker.read_text() == _pushed(root):
        return
    done = run_dvc(root, "push", *([dvc_name(stage)] if stage else []))
    if done.returncode:
        reason = (
            f"dvc push failed: {_last_error(done.stderr)} The run is complete here; run dvc push "
            "to send its outputs to the remote."
        )
        raise fault(kind_of(done.stderr), reason)
    if stage is None:
        note_pushed(root)


def note_pushed(root: Path) -> None:
    """Remember that everything in dvc.lock is in the default remote."""
    marker = root / STATE_FOLDER / "pushed"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text(_pushed(root))


def _pushed(root: Path) -> str:
    """Names a dvc.lock and the remote that has its outputs: its address, and the store that this
    address is of.
    """
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    remote = config["remote"][config["core"]["remote"]]
    where = [
        str(remote["url"]),
        str(remote.get("endpointurl") or os.environ.get("AWS_ENDPOINT_URL", "")),
    ]
    return hashlib.sha256(json.dumps(where).encode() + (root / "dvc.lock").read_bytes()).hexdigest()


def default_remote(root: Path) -> str | None:
    """URL of the default remote, None if there is none."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    name = config["core"].get("remote")
    return str(config["remote"][name]["url"]) if name in config["remote"] else None


def public(url: str | None) -> str | None:
    """An address that may be shown and kept: without user or password."""
    return url and re.sub(r"://[^/]*@", "://***@", url)


def error_line(text: str) -> str | None:
    """The first error in DVC's output, with the files listed below it."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("ERROR: "):
            message = line.removeprefix("ERROR: ").strip()
            listed = takewhile(lambda path: not path.startswith("Is your cache"), lines)
            return f"{message} {', '.join(listed)}." if message.endswith("targets:") else message
    return None


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _full_stop(error_line(text) or (lines[-1].strip() if lines else "no reason given"))


def _one_line(error: Exception) -> str:
    return _full_stop(" ".join(str(error).split()))


def _full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
