"""A run's data and models in a separate folder, taken from DVC's cache by digest, so that later runs do not replace
them.

Files are hard links into the cache where possible, so a champion takes no extra disk space, and `dvc gc` cannot remove
it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from config.dvc_stages import locked
from config.errors import EnvironmentFault, ModelError
from config.inputs import MODEL_DIGESTS, digest_files
from config.names import inside
from config.records import kept_folder
from config.workspace.champions import CHAMPIONS, FILES, champion_folder
from config.workspace.kept import kept_params
from config.yaml_text import yaml_content

ADAPTER_CONFIG = "adapter_config.json"


class Out(NamedTuple):
    """An output of a stage in a dvc.lock."""

    stage: str
    path: str
    digest: str


def run_outs(root: Path, run_id: str) -> dict[str, Out]:
    """Path -> the outputs that make a champion of a run: data, tokenizer, models.

    Raises ModelError if the run kept no dvc.lock, or did not come so far.
    """
    lock, params = _kept_lock(root, run_id), kept_params(root, run_id)
    method = params.align.method
    wanted = {
        "data/prepared": "data",
        "data/tokenizer": "data",
        "models/sft": "sft",
        "models/reward": "reward",
        f"models/{method}": method,
        f"models/{params.final_stage}": params.final_stage,
    }
    outs = {
        out["path"]: Out(stage, out["path"], out["md5"])
        for stage in params.stages
        for out in locked(lock, stage).get("outs", [])
        if wanted.get(out["path"]) == stage and "md5" in out
    }
    missing = next((path for path in wanted if path not in outs), None)
    if missing is not None:
        raise ModelError(
            f"run {run_id} made no {missing}, which a champion needs. Name a run that completed: "
            "rlhf compare lists them."
        )
    return outs


def _kept_lock(root: Path, run_id: str) -> dict[str, Any]:
    """The run's own dvc.lock. Raises ModelError if it is missing or unreadable."""
    kept = kept_folder(root, run_id)
    try:
        return {"stages": dict(yaml_content((kept / "dvc.lock").read_text(encoding="utf-8"))["stages"])}
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        raise ModelError(
            f"{kept}/dvc.lock is not there or cannot be read, so the outputs of run {run_id} are "
            "not known. Name another run."
        ) from None


@contextmanager
def gathered(root: Path, run_id: str, target: Path) -> Iterator[Path]:
    """A temporary folder `target` with the run's outputs, independent of the project's own folders. Raises as `gather`
    does, and EnvironmentFault if it cannot be written.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        try:
            target.mkdir(parents=True)
            gather(root, run_id, target)
        except OSError as error:
            raise EnvironmentFault(
                f"{target} cannot be written ({error.strerror}). Free some space and try again."
            ) from error
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def gather(root: Path, run_id: str, target: Path) -> None:
    """Fill `target` with the run's outputs, metrics and params.

    Raises ModelError if an output is gone everywhere, or if metrics or the base of an adapter are not those of the run
    any more.
    """
    from dvc.repo import Repo  # imported late, as everywhere: half a second

    outs = run_outs(root, run_id)
    with Repo(str(root)) as repo:
        for out in outs.values():
            _materialise(repo, out, run_id, target / out.path)
    if _add_bases(root, target):
        _require_base(root, run_id)
    kept, made_by = kept_folder(root, run_id), _made_by(_kept_lock(root, run_id)["stages"])
    shutil.copyfile(kept / "params.yaml", target / "params.yaml")
    (target / "metrics").mkdir(exist_ok=True)
    for metrics in (kept / "metrics").glob("*.json"):
        if made_by.get(f"metrics/{metrics.name}", _md5(metrics)) != _md5(metrics):
            raise ModelError(
                f"{metrics} was changed: it is not what run {run_id} made. Name another run, or "
                "make it again (rlhf run)."
            )
        shutil.copyfile(metrics, target / "metrics" / metrics.name)
    digests = {str(PurePosixPath(path.relative_to(target))): _md5(path) for path in _files(target)}
    (target / FILES).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def _made_by(stages: Mapping[str, Any]) -> dict[str, str]:
    """Path -> digest of all outputs in a dvc.lock."""
    return {out["path"]: out["md5"] for entry in stages.values() for out in entry.get("outs", []) if "md5" in out}


def _require_base(root: Path, run_id: str) -> None:
    """Raise ModelError unless the base model, which DVC does not keep, is unchanged since the run's data stage."""
    deps = locked(_kept_lock(root, run_id), "data").get("deps", [])
    md5 = next((dep.get("md5") for dep in deps if dep["path"] == str(MODEL_DIGESTS)), None)
    params = kept_params(root, run_id)
    now = hashlib.md5(digest_files(root, params)[MODEL_DIGESTS].encode(), usedforsecurity=False).hexdigest()
    if md5 is not None and md5 != now:
        raise ModelError(
            f"model.path={params.model.path} was changed since run {run_id}, whose adapters are based on it. Put it "
            "back."
        )


def _materialise(repo: Any, out: Out, run_id: str, target: Path) -> None:
    """Put the content behind an output's digest at `target`, from the cache or else from the remote."""
    stores = [repo.cache.local]
    if repo.config["core"].get("remote"):
        stores.append(repo.cloud.get_remote().odb)
    for name, digest in _content(stores, out, run_id):
        place = target / name if name else target
        place.parent.mkdir(parents=True, exist_ok=True)
        _fetch(stores, out, run_id, digest, place)


def _content(stores: list[Any], out: Out, run_id: str) -> Iterator[tuple[str, str]]:
    """(path within the output, digest) of its files; one with an empty path for an output that is a file."""
    if not out.digest.endswith(".dir"):
        yield "", out.digest
        return
    store = _holder(stores, out, run_id, out.digest)
    with store.fs.open(store.oid_to_path(out.digest), "r") as listing:
        yield from ((inside(entry["relpath"], out.digest), entry["md5"]) for entry in json.load(listing))


def _fetch(stores: list[Any], out: Out, run_id: str, digest: str, place: Path) -> None:
    store = _holder(stores, out, run_id, digest)
    source = store.oid_to_path(digest)
    if store is stores[0]:
        _link(Path(source), place)
    else:
        store.fs.get_file(source, str(place))


def _holder(stores: list[Any], out: Out, run_id: str, digest: str) -> Any:
    holder = next((store for store in stores if store.exists(digest)), None)
    if holder is None:
        raise ModelError(
            f"{out.path} of run {run_id} was deleted: {digest} is neither in DVC's cache nor in its remote. "
            "Make it again (rlhf run), or name another run."
        )
    return holder


def _add_bases(root: Path, target: Path) -> bool:
    """Copy project folders outside of DVC that an adapter refers to by relative path.

    Returns whether there are any.
    """
    added = False
    for config in sorted(target.glob(f"models/*/{ADAPTER_CONFIG}")):
        base = str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"])
        place = os.path.normpath(config.parent.relative_to(target) / base)
        if (
            not base.startswith(".")
            or place.startswith("..")
            or (target / place).exists()
            or not (root / place).is_dir()
        ):
            continue
        added = True
        for file in _files(root / place):
            copy = target / place / file.relative_to(root / place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(file, copy)
    return added


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def check_champion(root: Path, run_id: str) -> Path:
    """The folder of a champion, verified file by file.

    Raises EnvironmentFault that names the first file that is not.
    """
    folder = champion_folder(root, run_id)
    fault = _fault(folder)
    if fault is not None:
        raise EnvironmentFault(
            f"the champion {run_id} cannot be used: {fault}. Bring it back with rlhf promote {run_id} (from DVC's "
            "cache or remote), go back with rlhf rollback, or promote another run."
        )
    return folder


def _fault(folder: Path) -> str | None:
    place = CHAMPIONS / folder.name
    try:
        digests: Mapping[str, str] = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{place} was deleted or is no champion's folder"
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{place / name} was deleted"
        if _md5(path) != digest:
            return f"{place / name} was changed"
    return None


def is_complete(folder: Path) -> bool:
    return _fault(folder) is None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
