"""Checkpoints of a stage: whole or absent, bound to the stage's parameters and inputs, the newest good one found again.

checkpoints/<stage>/<fingerprint>/step-00000120/   what the stage saved, and manifest.json with size and digest of every file

The folder lies outside the DVC outs, because DVC deletes those before a rerun. The fingerprint is of the stage's parameters
and inputs, so a checkpoint made with other settings is never picked up.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from training.artifacts import replacing

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class Checkpoint(NamedTuple):
    path: Path
    step: int


def fingerprint(parameters: Mapping[str, Any], inputs: list[Path], root: Path) -> str:
    """Digest (16 hex digits) of parameters and of the content of files and folders, named by their place seen from `root`."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for item in sorted(inputs):
        files = sorted(path for path in item.rglob("*") if path.is_file()) if item.is_dir() else [item]
        for file in files:
            digest.update(os.path.relpath(file, root).encode() + b"\0" + _digest(file).encode())
    return digest.hexdigest()[:16]


class Checkpoints:
    """The checkpoints of one stage at one fingerprint."""

    def __init__(self, root: Path, stage: str, fingerprint: str, keep: int = 2) -> None:
        self.folder = root / "checkpoints" / stage / fingerprint
        self._keep = keep

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """A folder to write the state after `step` to; it counts once the block ends, and older ones are then removed."""
        target = self.folder / f"step-{step:08d}"
        with replacing(target) as temporary:
            temporary.mkdir()
            yield temporary
            write_manifest(temporary)
        for old in self._steps()[self._keep :]:
            shutil.rmtree(old)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all as the manifest says; a damaged one is passed over with a warning."""
        for path in self._steps():
            fault = damage(path)
            if fault is None:
                return Checkpoint(path, int(path.name.removeprefix("step-")))
            logger.warning("checkpoint %s is damaged (%s): falling back to the one before it", path, fault)
        return None

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), reverse=True)

    def clear(self) -> None:
        """Remove the checkpoints: the stage is done and its outputs are in place."""
        shutil.rmtree(self.folder, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Record size and digest of every file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(path.relative_to(folder)): [path.stat().st_size, _digest(path)] for path in files}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or cut"
    for name, (size, digest) in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
        if _digest(path) != digest:
            return f"{name} is not what was written"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
