"""Removes leftovers by age and size: checkpoints, studies, and what runs have made.

The champion's and those of a running run are kept. A run's rows, reports and kept copies stay. Outputs in DVC's cache
are counted with the newest run that made them; those that dvc.lock names stay.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from config.errors import EnvironmentFault
from config.locks import is_held, lock_file
from config.records import STAGES
from config.workspace.at_work import RUN_LOCK
from config.workspace.champions import read_record
from config.workspace.project import STUDIES, workspaces_of
from tasks.dvc.origins import cached_files, origins_folder, read_origin
from tasks.dvc.status import yaml_of
from tasks.stage.progress import attempts

RUN_AT_WORK, CHAMPIONS_OWN = "a run is running in it", "it is the champion's"


@dataclass(frozen=True)
class Leftover:
    """The checkpoints of one attempt of a stage, the workspace of a study, or what a run made."""

    kind: str
    """checkpoints, study or outputs."""
    path: Path
    workspace: Path
    """Lock that a running run holds."""
    size_bytes: int
    age_seconds: float
    """Since anything in it was written."""
    kept_because: str
    """Why it must stay; empty if it may go."""
    goes: bool = False
    cached: tuple[Path, ...] = ()
    """Files in DVC's cache that nothing that stays can reach."""


def leftovers(root: Path, now: float | None = None) -> list[Leftover]:
    """All that the project at `root` has. Nothing is changed."""
    now = time.time() if now is None else now
    champions = {entry.run_id for entry in read_record(root).lineage}
    candidates = []
    for stage in STAGES:
        in_use = _fingerprints_in_use(root, stage, champions)
        for path in _folders(root / "checkpoints" / stage):
            why = RUN_AT_WORK if is_held(root / RUN_LOCK) else in_use.get(path.name, "")
            candidates.append(_leftover("checkpoints", path, root, now, why))
    for path in _folders(root / STUDIES):
        why = RUN_AT_WORK if is_held(path / RUN_LOCK) else ""
        candidates.append(_leftover("study", path, path, now, why))
    return [*candidates, *_outputs(root, champions, now)]


def _outputs(root: Path, champions: set[str], now: float) -> list[Leftover]:
    """What each run made that a later run could reuse."""
    workspaces = workspaces_of(root)  # studies share the cache
    running = any(is_held(workspace / RUN_LOCK) for workspace in workspaces)
    locks = [yaml_of(workspace / "dvc.lock").get("stages", {}) for workspace in workspaces]
    reached = {path for lock in locks for entry in lock.values() for path in cached_files(root, entry)}
    records = {
        folder: {
            path
            for record in folder.glob("*.json")
            if (origin := read_origin(record))
            for path in cached_files(root, origin.entry)
        }
        for folder in reversed(_folders(origins_folder(root)))
    }
    reached |= {path for folder, files in records.items() if folder.name in champions for path in files}
    leftovers = []
    for folder, files in records.items():
        why = RUN_AT_WORK if running else CHAMPIONS_OWN if folder.name in champions else ""
        leftover, unshared = _leftover("outputs", folder, root, now, why), tuple(sorted(files - reached))
        size = leftover.size_bytes + sum(path.stat().st_size for path in unshared)
        leftovers.append(replace(leftover, size_bytes=size, cached=unshared))
        reached |= files
    return leftovers


def chosen(candidates: Sequence[Leftover], older_than_seconds: float, max_bytes: int | None) -> list[Leftover]:
    """`candidates`, oldest first, each marked whether it goes: all above the age, then the oldest until the rest fits
    in `max_bytes`.
    """
    oldest_first = sorted(candidates, key=lambda leftover: -leftover.age_seconds)
    total_bytes, judged = sum(leftover.size_bytes for leftover in candidates), []
    for leftover in oldest_first:
        goes = not leftover.kept_because and (
            leftover.age_seconds > older_than_seconds or (max_bytes is not None and total_bytes > max_bytes)
        )
        total_bytes -= leftover.size_bytes if goes else 0
        judged.append(replace(leftover, goes=goes))
    return judged


def remove(leftover: Leftover) -> bool:
    """Remove it while holding its workspace's lock; False if a run has begun there since. Raises EnvironmentFault."""
    with lock_file(leftover.workspace / RUN_LOCK) as holder:
        if holder is not None:
            return False
        try:
            shutil.rmtree(leftover.path)
            for path in leftover.cached:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(
                f"{leftover.path} cannot be removed ({error.strerror}). Remove it as the user who made "
                "it, or make it writable."
            ) from None
    return True


def _folders(parent: Path) -> list[Path]:
    """Its direct subfolders, links excluded."""
    return (
        sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()) if parent.is_dir() else []
    )


def _fingerprints_in_use(root: Path, stage: str, champions: set[str]) -> dict[str, str]:
    """Fingerprint -> why its checkpoints stay."""
    rows = attempts(root, stage)
    used = {row.fingerprint: CHAMPIONS_OWN for row in rows if row.run_id in champions}
    if rows and rows[-1].event != "end" and psutil.pid_exists(rows[-1].pid):
        used[rows[-1].fingerprint] = f"{stage} is running (process {rows[-1].pid})"
    return used


def _leftover(kind: str, path: Path, workspace: Path, now: float, kept_because: str) -> Leftover:
    statuses = list(_statuses(path))
    newest = max((status.st_mtime for status in statuses), default=now)
    return Leftover(
        kind, path, workspace, sum(status.st_size for status in statuses), max(0.0, now - newest), kept_because
    )


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Size of the folder with all its files; files that vanish meanwhile are left out."""
    yield folder.stat()
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if not path.is_dir() or path.is_symlink():
            yield status
