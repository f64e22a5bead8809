"""Outputs that are not here: what DVC knows of them from dvc.lock, and how they come from the
remote.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.errors import EnvironmentFault
from tasks.dvc.status import (
    changes,
    default_remote,
    dvc_stage,
    environment,
    error_line,
    is_only_absent,
    public,
    repo_about,
)

LARGE = ("data/", "models/")
"""Outputs that stay in the store until somebody reads them; the others are numbers and texts for
reports.
"""
OUTSIDE = "inputs"
"""The stage whose outputs are digests of what is outside of the project; they travel with the
request.
"""
PULL_TIMEOUT_SECONDS = 3600.0
PUBLIC_OPTIONS = ("endpointurl", "region")
"""Settings of a remote that are no secret; a container finds its credentials by itself."""


def remote_of(root: Path) -> dict[str, str]:
    """Name, URL and public settings of the default remote. Raises EnvironmentFault if there is
    none.
    """
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    url, name = default_remote(root), config["core"].get("remote")
    if url is None:
        raise EnvironmentFault(
            "a stage is placed on a work pool, and DVC has no default remote to hand its data "
            "over: "
            "dvc remote add --default store s3://bucket/folder."
        )
    _require_common(url)
    options = config["remote"][name]
    return {
        "name": name,
        "url": url,
        **{key: str(options[key]) for key in PUBLIC_OPTIONS if key in options},
    }


def _require_common(url: str) -> None:
    """Raise EnvironmentFault unless containers reach the address too: they have no credentials but
    those of S3, and its text is kept and shown.
    """
    scheme, _, rest = url.rpartition("://")
    if "@" in rest.split("/")[0]:
        raise EnvironmentFault(
            f"the address of the DVC remote on {rest.split('/')[0].rpartition('@')[2]} holds a "
            "user or a password, and it would be kept and shown in "
            "many places. Take them out: dvc remote modify --local; of S3, name "
            "AWS_SHARED_CREDENTIALS_FILE."
        )
    if scheme not in ("", "s3"):
        raise EnvironmentFault(
            f"a stage is placed on a work pool, and the DVC remote {url} can not be reached from "
            "there: only s3:// and a shared folder can. "
            "dvc remote add --default store s3://bucket/folder, or set placement to local."
        )


def inputs_of(root: Path, stage: str) -> list[str]:
    """Outputs of other stages that `stage` reads, or parts of them, by their place in the
    project.
    """
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        made = _outs(repo)
        return [
            _place(root, dep)
            for dep in dvc_stage(repo, root, stage).deps
            if (owner := _owner(made, dep)) and owner.stage.name != OUTSIDE
        ]


def small_outputs(root: Path, stage: str) -> list[str]:
    """Outputs of `stage` that the pipeline reads itself: metrics, data of plots, samples."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return [
            path
            for out in dvc_stage(repo, root, stage).outs
            if not (path := _place(root, out)).startswith(LARGE)
        ]


def fetch(root: Path, paths: Sequence[str]) -> None:
    """Bring what is not there, as dvc.lock has it. Raises EnvironmentFault if the remote does not
    give it.
    """
    missing = [path for path in paths if not (root / path).exists()]
    if not missing:
        return
    command = [sys.executable, "-m", "dvc", "pull", "--quiet", *missing]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PULL_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"dvc pull of {', '.join(missing)} took more than {PULL_TIMEOUT_SECONDS:.0f} s and was "
            "given up."
        ) from None
    if done.returncode:
        reason = error_line(done.stderr) or f"exit code {done.returncode}."
        raise EnvironmentFault(
            f"{', '.join(missing)} could not be fetched from the DVC remote "
            f"{public(default_remote(root))}: {reason}"
        )


def is_unchanged_elsewhere(root: Path, stage: str) -> bool:
    """As `tasks.dvc.status.is_unchanged`, where outputs may be in the remote alone: what is missing
    here counts as what dvc.lock says.
    """
    with repo_about(root, stage) as repo:
        return all(map(is_only_absent, changes(repo, root, stage))) and _reads_what_is_locked(
            repo, root, stage
        )


def _reads_what_is_locked(repo: Any, root: Path, stage: str) -> bool:
    """Whether each input's digest, when the stage was done, is that of the output it comes from
    today; folders are looked into.
    """
    made = _outs(repo)
    for dep in dvc_stage(repo, root, stage).deps:
        owner = _owner(made, dep)
        if owner is None or Path(dep.fs_path).exists() or not owner.hash_info:
            continue
        now = owner.hash_info if dep.fs_path == owner.fs_path else _part(owner, dep.fs_path)
        if now is None or now.value != dep.hash_info.value:
            return False
    return True


def _part(owner: Any, path: str) -> Any:
    """Digest of what is at `path` in a folder; its list of files, not the files, is brought from
    the remote if need be.
    """
    tree = owner.get_obj(filter_info=path)
    if tree is None:
        owner.get_dir_cache()
        tree = owner.get_obj(filter_info=path)
    return tree.hash_info if tree is not None else None


def _outs(repo: Any) -> dict[str, Any]:
    """Path -> output of any stage."""
    return {out.fs_path: out for stage in repo.index.stages for out in stage.outs}


def _owner(made: dict[str, Any], dep: Any) -> Any:
    """The output that an input is, or is a part of; None for code and parameters."""
    path = Path(dep.fs_path)
    return next(
        (made[str(parent)] for parent in (path, *path.parents) if str(parent) in made), None
    )


def _place(root: Path, item: Any) -> str:
    return Path(item.fs_path).relative_to(root.resolve()).as_posix()
