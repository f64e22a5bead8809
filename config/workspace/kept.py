"""What a run kept: its params, its completed stages, copies of small outputs."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from config.compose import compose
from config.errors import ParamsError
from config.load import load, read, validate
from config.records import kept_folder
from config.schema import Params
from config.sections.where import DEFAULT
from config.workspace.rows import pipeline_rows

Outs = Mapping[str, str]
"""Path of a stage's output -> DVC's digest of it."""


def kept_params(root: Path, run_id: str, overrides: list[str] | None = None) -> Params:
    """The params of a past run, after `section.key=value` overrides. Parameters added to the schema since are taken
    from the project's params.yaml.

    Raises ParamsError if the copy is missing or damaged, or names what the schema does not have.
    """
    path = kept_folder(root, run_id) / "params.yaml"
    try:
        return load(path, overrides)
    except ParamsError:
        if not path.exists():
            raise
        try:
            content, today = read(path), read(root / "params.yaml")
            if "where" in content:  # stages may be named differently today
                today["where"] = {DEFAULT: today["where"][DEFAULT]}
            return validate(compose(today, content, overrides or []), str(path))
        except ParamsError:
            pass
        raise  # report what is wrong with the copy itself


def completed_stages(root: Path, run_id: str) -> dict[str, Outs]:
    """The stages that a run made or reused, each with its outputs as dvc.lock had them then.

    Other outputs in the workspace belong to other runs.
    """
    rows = pipeline_rows(root)
    return {row.stage: row.detail.get("outs", {}) for row in rows if (row.run_id, row.event) == (run_id, "stage")}


def kept_file(root: Path, run_id: str, path: str, digest: str | None) -> Path | None:
    """The file at `path` as a run left it: its copy or the current file, whichever has `digest`.

    Without DVC's digest only the copy is known to be the run's. None if neither is.
    """
    copy, current = kept_folder(root, run_id) / path, root / path
    if digest is None:
        return copy if copy.is_file() else None
    return next((file for file in (copy, current) if file.is_file() and file_digest(file) == digest), None)


def file_digest(path: Path) -> str:
    """MD5 of the bytes, as in dvc.lock."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
