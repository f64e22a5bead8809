"""A separate workspace for a run or a placed stage: the code and a DVC remote, nothing else."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any
from uuid import UUID

from config.errors import EnvironmentFault
from config.inputs import named_paths
from config.locks import lock_file
from config.schema import Params
from tasks.run.store import Store

PACKAGES = ("config", "costs", "flows", "labelling", "reporting", "serving", "tasks", "tracking", "training", "cli")
FILES = ("dvc.yaml", "constraints.txt")
HOME = Path(__file__).parents[2]
"""Where the code that runs here lies: a checkout, the folder of an image, or what Ray has shipped."""
PROJECT = "project"
"""Workspace of the deployed runs: champions, votes, rows, what the month has cost."""


def pinned_versions(root: Path) -> dict[str, str]:
    """Package -> its version in constraints.txt."""
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^\s*([\w.\[\]-]+)\s*==\s*([^\s#]+)", text, re.MULTILINE))


def workspaces() -> Path:
    """The folder of the workspaces."""
    return Path(os.environ.get("RLHF_WORKSPACES", "/workspaces"))


def cache() -> Path:
    """The folder that stages of one machine share, for what they fetched and made; it can be lost."""
    return Path(os.environ.get("RLHF_CACHE", "/cache"))


def lay_out(root: Path, remote: dict[str, str], shared: Path | None = None) -> None:
    """Copy the code to `root`, and name the remote: its name, URL and public settings. `shared` is DVC's cache, by
    default that of the machine's containers.
    """
    root.mkdir(parents=True)
    # what is compiled goes along: times are kept, so it counts
    ignored = shutil.ignore_patterns("config.local", "tmp", "cache")
    for name in (*PACKAGES, ".dvc"):
        shutil.copytree(HOME / name, root / name, ignore=ignored)
    for name in (*FILES, ".dvcignore"):
        shutil.copyfile(HOME / name, root / name)
    (root / ".dvc" / "config.local").write_text(_dvc_config(remote, shared), encoding="utf-8")


def _dvc_config(remote: dict[str, str], shared: Path | None) -> str:
    """No git, a cache that others use too, and the store."""
    options = "".join(f"    {key} = {value}\n" for key, value in remote.items() if key != "name")
    return f"""[core]
    no_scm = true
    remote = {remote["name"]}
[cache]
    dir = {shared or cache() / "dvc"}
['remote "{remote["name"]}"']
{options}"""


def project(remote: str) -> dict[str, Any]:
    """A pull step of a deployment: the one workspace in which champions, votes and rows stay from run to run; it is
    held by one run at a time. Its code follows the image's; the rest is never touched.

    Raises EnvironmentFault, which the run then shows as the reason why it failed.
    """
    from prefect.runtime import flow_run

    root = workspaces() / PROJECT
    try:
        with lock_file(workspaces() / f".{PROJECT}.lock", lambda _: True):
            bring_code(root, {"name": "store", "url": remote})
        Store(remote).require()
    except (EnvironmentFault, OSError) as error:
        raise _failed(str(flow_run.id), f"the workspace {root} could not be made ready: {error}") from None
    return {"directory": str(root)}


def bring_code(root: Path, remote: dict[str, str], shared: Path | None = None) -> None:
    """Create `root`, or replace its code with the running code if it differs."""
    new = root.with_name(f".{root.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    if root.exists() and _has_this_code(root):
        (root / ".dvc" / "config.local").write_text(_dvc_config(remote, shared), encoding="utf-8")
        return
    lay_out(new, remote, shared)
    if not root.exists():
        new.rename(root)
        return
    for entry in sorted(new.iterdir(), key=lambda path: path.name in FILES):
        shutil.rmtree(root / entry.name, ignore_errors=True)
        entry.replace(root / entry.name)
    shutil.rmtree(new)


def link_inputs(root: Path, place: Path, params: Params) -> None:
    """Link the local files of the project at `root` that params.yaml names into `place`."""
    for path in named_paths(root, params):
        if not Path(path).is_absolute():
            link(place / path, root / path)


def link(path: Path, target: Path) -> None:
    """Make `path` a relative link to `target`, unless something is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink() and not path.exists():
        path.symlink_to(os.path.relpath(target.resolve(), path.parent.resolve()))


def _has_this_code(root: Path) -> bool:
    try:
        return code_digest(root) == code_digest(HOME)
    except OSError:
        return False


def code_digest(home: Path) -> str:
    """Of the modules, of dvc.yaml and of the versions of the packages."""
    digest = hashlib.sha256()
    modules = [path for package in PACKAGES for path in sorted((home / package).rglob("*.py"))]
    for path in [*modules, *(home / name for name in FILES)]:
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _failed(flow_run: str, message: str) -> EnvironmentFault:
    """Fail the run with `message`: Prefect itself would only say in which step it ended."""
    from prefect import get_client
    from prefect.states import Failed

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(flow_run), Failed(message=message), force=True)
    return EnvironmentFault(message)
