"""Restores a past run: its params, its dvc.lock and its outputs, from DVC's cache or the remote."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config.atomic_file import keep_copy, write_atomically
from config.differences import Difference, differences
from config.dvc_stages import locked as entry_of
from config.errors import EnvironmentFault, UserError
from config.inputs import write_digests
from config.load import read, write
from config.records import kept_folder
from config.schema import Params
from config.workspace.at_work import locked
from config.workspace.kept import completed_stages, kept_params
from config.yaml_text import yaml_content
from tasks.dvc.light_stages import do_light_stages
from tasks.dvc.transfers import check_out, reason

LOCK, PARAMS = "dvc.lock", "params.yaml"
UNSAVED = "unsaved files"
"""DVC's message if it would have to remove a file that is not in its cache."""


class Restored(NamedTuple):
    run_id: str
    stages: tuple[str, ...]
    changed: list[Difference]
    """Parameters that restoring changed in params.yaml."""
    backup: Path | None
    """Copy of the earlier params.yaml, if it differed."""


def restore(root: Path, run_id: str) -> Restored:
    """Restore the workspace to its state after `run_id`; nothing is trained.

    Raises UserError for a run that kept too little, EnvironmentFault if a run is running or outputs are nowhere to be
    had: then nothing has changed.
    """
    with locked(root):
        params = kept_params(root, run_id)
        stages = _stages(root, run_id, params)
        lock = _lock(root, run_id, stages)
        changed = differences(read(root / PARAMS), params.model_dump(mode="json"))
        before = {name: _bytes(root / name) for name in (LOCK, PARAMS)}
        backup = keep_copy(root / PARAMS) if changed else None
        try:
            write(params, root / PARAMS)
            write_atomically(root / LOCK, yaml.safe_dump(lock, sort_keys=False))
            _check_out(root, run_id)
        except BaseException:
            for name, content in before.items():
                _put_back(root / name, content)
            if backup is not None:
                backup.unlink()
            check_out(root)
            raise
        write_digests(root, params)
        do_light_stages(root, params)
        return Restored(run_id, stages, changed, backup)


def _stages(root: Path, run_id: str, params: Params) -> tuple[str, ...]:
    """The stages that the run completed, all of a run's. Raises UserError."""
    completed = completed_stages(root, run_id)
    missing = [stage for stage in params.stages if stage not in completed]
    if missing:
        raise UserError(
            f"run {run_id} did not complete {', '.join(missing)}, so that there is no complete run "
            "to bring back. Name a completed one: rlhf runs lists them."
        )
    return params.stages


def _lock(root: Path, run_id: str, stages: tuple[str, ...]) -> dict[str, Any]:
    """dvc.lock with the entries of the run; those of stages that are not of it stay. Raises UserError."""
    kept = kept_folder(root, run_id) / LOCK
    if not kept.exists():
        raise UserError(f"run {run_id} cannot be brought back: {kept.relative_to(root)} is gone. Name another.")
    theirs = yaml_content(kept.read_text(encoding="utf-8"))
    absent = [stage for stage in stages if not entry_of(theirs, stage)]
    if absent:
        raise UserError(f"run {run_id} cannot be brought back: its dvc.lock has no {', '.join(absent)}. Name another.")
    ours = yaml_content(content) if (content := _bytes(root / LOCK)) else {}
    return {**theirs, "stages": {**ours.get("stages", {}), **theirs["stages"]}}


def _check_out(root: Path, run_id: str) -> None:
    """Put the outputs of dvc.lock in place. Raises EnvironmentFault."""
    if not (errors := check_out(root)):
        return
    if UNSAVED in str(errors[-1]):
        raise EnvironmentFault(
            f"run {run_id} is not brought back: an output that is in place was changed by hand or "
            "is in no cache, and would be lost. Keep it with dvc commit, or remove it."
        )
    raise EnvironmentFault(
        f"run {run_id} cannot be brought back, its outputs cannot be fetched: {reason(errors)} Nothing was changed. "
        "With the same parameters, rlhf run makes them again."
    )


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _put_back(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, content)
