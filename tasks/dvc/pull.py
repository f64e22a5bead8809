"""What a stage on another node needs: the remote, and the outputs that it reads and makes."""

from pathlib import Path
from typing import Any

from config.errors import EnvironmentFault
from tasks.dvc.lock_digests import dvc_stage, is_copy, outs_by_path
from tasks.dvc.transfers import default_remote

LARGE = ("data/", "models/")
"""Outputs that stay in the store until they are read; the others are numbers and texts for reports."""
PUBLIC_OPTIONS = ("endpointurl", "region")
"""Public settings of a remote; a node finds credentials by itself."""


def remote_of(root: Path) -> dict[str, str]:
    """Name, URL and public settings of the default remote. Raises EnvironmentFault if there is none."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"))
    url, name = default_remote(root), config["core"].get("remote")
    if url is None:
        raise EnvironmentFault(
            "a stage is placed on a pool, and DVC has no default remote to hand its data over: "
            "dvc remote add --default store s3://bucket/folder."
        )
    _require_common(url)
    options = config["remote"][name]
    return {"name": name, "url": url, **{key: str(options[key]) for key in PUBLIC_OPTIONS if key in options}}


def _require_common(url: str) -> None:
    """Raise EnvironmentFault unless other nodes reach the address too: they have no credentials but those of S3, and
    its text is kept and shown.
    """
    scheme, _, rest = url.rpartition("://")
    if "@" in rest.split("/")[0]:
        raise EnvironmentFault(
            f"the address of the DVC remote on {rest.split('/')[0].rpartition('@')[2]} holds a user or a password, "
            "and it would be kept and shown in many places. Take them out: dvc remote modify --local; of S3, "
            "name AWS_SHARED_CREDENTIALS_FILE."
        )
    if scheme not in ("", "s3"):
        raise EnvironmentFault(
            f"a stage is placed on a pool, and the DVC remote {url} cannot be reached from "
            "there: only s3:// and a shared folder can. "
            "dvc remote add --default store s3://bucket/folder, or set where.default.pool to local."
        )


def inputs_of(root: Path, stage: str) -> list[str]:
    """Outputs of other stages that `stage` reads, or parts of them, by their place in the project."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        outs = outs_by_path(repo.index.stages)
        return [_place(root, dep) for dep in dvc_stage(repo, root, stage).deps if is_copy(outs, dep)]


def small_outputs(root: Path, stage: str) -> list[str]:
    """Outputs of `stage` that the pipeline reads itself: metrics, plot data, samples."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return [path for out in dvc_stage(repo, root, stage).outs if not (path := _place(root, out)).startswith(LARGE)]


def _place(root: Path, item: Any) -> str:
    return Path(item.fs_path).relative_to(root.resolve()).as_posix()
