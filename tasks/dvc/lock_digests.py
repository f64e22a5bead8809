"""Outputs by their digest in dvc.lock, whatever is on disk, which may be missing or left from an earlier run.

If stages run on other machines, only dvc.lock tells what a stage has made; files of the checkout are copies.
"""

import json
from pathlib import Path
from typing import Any

from config.differences import value_at
from config.dvc_stages import dvc_name
from config.methods.registry import METHODS

OUTSIDE = "inputs"
"""The stage whose outputs are digests of what is outside of the project; they travel with the request."""
OF_COPIES = ("deleted", "not in cache", "modified")
"""DVC's words for a copy that is missing or differs from dvc.lock."""


def changes_by_lock(repo: Any, root: Path, stage: str, status: list[Any]) -> list[Any]:
    """Changes that DVC reports for `stage`, except its copies of outputs, and inputs whose digest in dvc.lock differs
    from when the stage was done, even if DVC could not see that.
    """
    outs, entry = outs_by_path(repo), dvc_stage(repo, root, stage)
    ours = {_name(root, out) for out in entry.outs if out.hash_info}
    theirs = {_name(root, dep): dep for dep in entry.deps if is_copy(outs, dep)}
    counted = [change for change in (_without(change, ours | set(theirs)) for change in status) if change]
    other = [name for name, dep in theirs.items() if _reads_another(repo, outs, dep)]
    return counted + ([{"changed deps": dict.fromkeys(other, "modified")}] if other else [])


def _reads_another(repo: Any, outs: dict[str, Any], dep: Any) -> bool:
    """Whether dvc.lock has an input with other content than when the stage was done: of single values of a file, other
    values. A stage that was never done has read nothing.
    """
    from dvc.dependency.param import ParamsDependency

    if not isinstance(dep, ParamsDependency):
        return locked_digest(outs, dep.fs_path) != _digest(dep)
    if not dep.hash_info:
        return True
    values = _locked_values(repo, outs[dep.fs_path])
    return any(value_at(values, key) != value for key, value in dep.hash_info.value.items())


def _locked_values(repo: Any, out: Any) -> Any:
    """The content of a JSON file by its digest in dvc.lock, brought from the remote if need be; nothing if dvc.lock
    has none, or the file is missing.
    """
    if not out.hash_info:
        return {}
    cached = Path(out.cache.oid_to_path(out.hash_info.value))
    if not cached.exists():
        repo.cloud.pull([out.hash_info])
    return json.loads(cached.read_text(encoding="utf-8")) if cached.exists() else {}


def is_locked_content(repo: Any, path: str) -> bool:
    """Whether what lies at `path`, an output or a part of one, is what dvc.lock has there."""
    from dvc_data.hashfile.build import build

    if not Path(path).exists():
        return False
    outs = outs_by_path(repo)
    out = owner_of(outs, path)
    if out is None or not out.hash_info:
        return False
    if out.fs_path == path:
        return not out.changed_checksum()
    _, _, content = build(out.cache, path, out.fs, out.hash_name, ignore=out.dvcignore, dry_run=True)
    return bool(content.hash_info.value == locked_digest(outs, path))


def locked_digest(outs: dict[str, Any], path: str) -> str | None:
    """Digest in dvc.lock of an output or of a part of one, None if it has none. The list of a folder's files, not the
    files, is brought from the remote if need be.
    """
    out = owner_of(outs, path)
    if out is None or not out.hash_info:
        return None
    if out.fs_path == path:
        return str(out.hash_info.value)
    tree = out.get_obj(filter_info=path)
    if tree is None:
        out.get_dir_cache()
        tree = out.get_obj(filter_info=path)
    return str(tree.hash_info.value) if tree is not None else None


def outs_by_path(repo: Any) -> dict[str, Any]:
    """Path -> output of any stage."""
    return {out.fs_path: out for stage in repo.index.stages for out in stage.outs}


def owner_of(outs: dict[str, Any], path: str) -> Any:
    """The output that is at `path`, or that it is a part of; None for code and parameters."""
    return next((outs[str(place)] for place in (Path(path), *Path(path).parents) if str(place) in outs), None)


def is_copy(outs: dict[str, Any], dep: Any) -> bool:
    """Whether an input is an output of another stage."""
    out = owner_of(outs, dep.fs_path)
    return out is not None and out.stage.name != OUTSIDE


def dvc_stage(repo: Any, root: Path, stage: str) -> Any:
    """DVC's own object of a stage; of an alignment method also where params.yaml names another one for now."""
    from dvc.dvcfile import load_file
    from dvc.parsing.context import Context

    stages = load_file(repo, str(root.resolve() / "dvc.yaml")).stages
    if stage in METHODS:
        stages.resolver.context.merge_update(Context({"align": {"method": stage}}), overwrite=True)
    return stages[dvc_name(stage)]


def _digest(dep: Any) -> str | None:
    """Digest of an input when its stage ran."""
    return dep.hash_info.value if dep.hash_info else None


def _without(change: Any, names: set[str]) -> Any:
    """A change without its entries about copies at `names` or single values in them; empty if there are no others."""
    if not isinstance(change, dict):
        return change
    remaining = {
        kind: {
            name: state
            for name, state in items.items()
            if name not in names or not (isinstance(state, dict) or state in OF_COPIES)
        }
        for kind, items in change.items()
    }
    return {kind: items for kind, items in remaining.items() if items}


def _name(root: Path, item: Any) -> str:
    return Path(item.fs_path).relative_to(root.resolve()).as_posix()
