"""Checks that params.yaml, and DVC's record of it, still match the start of the run: it must not be
edited meanwhile.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.differences import differences, in_a_line, sections_of
from config.dvc_stages import defined, locked
from config.errors import ParamsError
from config.load import load
from tasks.dvc.status import forget, repo_about, yaml_of
from tasks.run.run import Run


def require_same_params(run: Run, stage: str) -> None:
    """Before `stage` starts or is found unchanged. Raises ParamsError if params.yaml differs from
    the run's own copy.
    """
    keys = _keys(run, stage)
    found = differences(
        sections_of(run.params, keys), sections_of(load(run.root / "params.yaml"), keys)
    )
    if found:
        raise ParamsError(
            f"params.yaml changed since the run {run.run_id} began: {in_a_line(found)}, which "
            f"{stage} reads. "
            "Put the old value back and run again to go on, or run again to begin with the new one."
        )


def require_recorded_params(run: Run, stage: str) -> None:
    """Call after DVC has recorded `stage`: it reads params.yaml again when the process has ended. A
    record with other values is removed.

    Raises ParamsError.
    """
    entry = locked(yaml_of(run.root / "dvc.lock"), stage)
    recorded = entry.get("params", {}).get("params.yaml", {})
    found = differences(sections_of(run.params, _keys(run, stage)), recorded)
    if found:
        forget(run.root, stage)
        _forget_in_run_cache(run.root, stage, entry)
        raise ParamsError(
            f"params.yaml changed while DVC was recording {stage}: {in_a_line(found)}. "
            "The record is removed. "
            "Put the old value back and run again: its outputs are kept."
        )


def _forget_in_run_cache(root: Path, stage: str, entry: dict[str, Any]) -> None:
    """Otherwise DVC would restore the outputs for these params later."""
    with repo_about(root, stage) as repo:
        folder = Path(repo.stage_cache.cache_dir)
    for file in folder.glob("*/*/*"):
        content = yaml_of(file)
        if all(content.get(key) == entry.get(key) for key in ("cmd", "params")):
            file.unlink()
            with suppress(OSError):  # others are in it; DVC fails on an empty folder
                file.parent.rmdir()


def _keys(run: Run, stage: str) -> Sequence[str]:
    """What dvc.yaml has the stage read of params.yaml."""
    return [key for key in defined(run.root)[stage].get("params", []) if isinstance(key, str)]
