"""Outputs by their digest in dvc.lock, whatever is on disk, which may be missing or left from an earlier run.

If stages run on other machines, only dvc.lock tells what a stage has made; files of the checkout are copies.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config.dvc_stages import dvc_name
from config.methods.registry import METHODS

OUTSIDE = "inputs"
"""The stage whose outputs are digests of what is outside of the project; they travel with the request."""


def lock_content(root: Path) -> dict[str, Any]:
    """The content of dvc.lock as DVC reads it: it knows numbers like 1e-05, which PyYAML takes for text."""
    from dvc.utils.serialize import load_yaml

    path = root / "dvc.lock"
    content = plain(load_yaml(str(path))) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def plain(value: Any) -> Any:
    """Convert DVC's ordered mappings to plain ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def json_by_digest(repo: Any, out: Any) -> Any:
    """The content of a JSON file by its digest, brought from the remote if need be; nothing without a digest, or if
    the file is missing.
    """
    if not out.hash_info:
        return {}
    cached = Path(out.cache.oid_to_path(out.hash_info.value))
    if not cached.exists() and repo.config["core"].get("remote"):
        repo.cloud.pull([out.hash_info])
    return json.loads(cached.read_text(encoding="utf-8")) if cached.exists() else {}


def is_locked_content(repo: Any, path: str) -> bool:
    """Whether what lies at `path`, an output or a part of one, is what dvc.lock has there."""
    from dvc_data.hashfile.build import build

    if not Path(path).exists():
        return False
    outs = outs_by_path(repo.index.stages)
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


def outs_by_path(stages: Iterable[Any]) -> dict[str, Any]:
    """Path -> output of any of the stages."""
    return {out.fs_path: out for stage in stages for out in stage.outs}


def owner_of(outs: dict[str, Any], path: str) -> Any:
    """The output that is at `path`, or that it is a part of; None for code and parameters."""
    return next((outs[str(place)] for place in (Path(path), *Path(path).parents) if str(place) in outs), None)


def is_copy(outs: dict[str, Any], dep: Any) -> bool:
    """Whether an input is an output of another stage."""
    out = owner_of(outs, dep.fs_path)
    return out is not None and out.stage.name != OUTSIDE


def dvc_stages(repo: Any, root: Path, method: str | None = None) -> dict[str, Any]:
    """DVC's own objects of the stages in dvc.yaml, by their names there; with a method, as if params.yaml named it."""
    stages = _stage_loader(repo, root, method)
    return {name: stages[name] for name in stages}  # each look-up makes a new object


def dvc_stage(repo: Any, root: Path, stage: str) -> Any:
    """DVC's own object of a stage; of an alignment method also where params.yaml names another one for now."""
    return _stage_loader(repo, root, stage if stage in METHODS else None)[dvc_name(stage)]


def _stage_loader(repo: Any, root: Path, method: str | None) -> Any:
    from dvc.dvcfile import load_file
    from dvc.parsing.context import Context

    stages = load_file(repo, str(root.resolve() / "dvc.yaml")).stages
    if method is not None:
        stages.resolver.context.merge_update(Context({"align": {"method": method}}), overwrite=True)
    return stages
