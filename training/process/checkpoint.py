"""Checkpoints of a stage: atomic, bound to the stage's parameters and inputs; the newest valid one is found again.

checkpoints/<stage>/<fingerprint>/step-00000120/   what the stage saved, code.json with the digests
of the code that made it, and
                                                   manifest.json with size and digest of every file
checkpoints/<stage>/done.json                      that the outputs are in place: digests of them,
of the code, and the fingerprint

The folder lies outside the DVC outs, because DVC deletes those before a rerun. The fingerprint is of the stage's
parameters and inputs, so a checkpoint made with other settings is never picked up. The code is not in it: whether to
go on from what other code made is for the user to say (`training.process.run.resolve_changed_code`).
"""

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import CheckpointError
from config.stage_code import CODE, changed_code
from training.distributed import collectives, nodes
from training.process.artifacts import replacing, temporary_of, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DONE = "done.json"
STEP = re.compile(r"step-\d+")


class Checkpoint(NamedTuple):
    path: Path
    step: int


def fingerprint(parameters: Mapping[str, Any], inputs: list[Path], root: Path) -> str:
    """Digest (16 hex digits) of parameters and of the content of files and folders, named relative to `root`."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for item in sorted(inputs):
        files = sorted(path for path in item.rglob("*") if path.is_file()) if item.is_dir() else [item]
        for file in files:
            digest.update(os.path.relpath(file, root).encode() + b"\0" + _digest(file).encode())
    return digest.hexdigest()[:16]


class Checkpoints:
    """The checkpoints of one stage at one fingerprint."""

    def __init__(
        self, root: Path, stage: str, fingerprint: str, keep: int = 2, code: Mapping[str, str] | None = None
    ) -> None:
        """`code` is the digest of each file that decides the stage's numbers."""
        self.folder = root / "checkpoints" / stage / fingerprint
        self._root = root
        self._fingerprint = fingerprint
        self._keep = keep
        self._code = dict(code or {})
        self._passed_over: list[Path] = []
        """Rejected by `latest`, as damaged or of other code: they do not count among the checkpoints to keep."""

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """A folder to write the state after `step` to; it becomes valid once the block ends in all processes; older
        ones are then removed.
        """
        target = self.folder / f"step-{step:08d}"
        if collectives.rank() > 0:
            apart = temporary_of(target) if collectives.rank() in nodes.leaders() else None
            if apart is not None:
                shutil.rmtree(apart, ignore_errors=True)
                apart.mkdir(parents=True)
            collectives.barrier()
            yield temporary_of(target)
            collectives.barrier()
            nodes.gather_files(temporary_of(target))
            if apart is not None:
                shutil.rmtree(apart)
            return
        with replacing(target) as temporary:
            temporary.mkdir()
            collectives.barrier()
            yield temporary
            collectives.barrier()
            nodes.gather_files(temporary)
            (temporary / CODE).write_text(json.dumps(self._code, indent=1), encoding="utf-8")
            write_manifest(temporary)
        bad = [path for path in self._passed_over if path != target]
        for old in [*bad, *[path for path in self._steps() if path not in bad][self._keep :]]:
            shutil.rmtree(old, ignore_errors=True)
        self._passed_over = []

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files match the manifest; damaged ones are skipped, with one warning each.

        Collective; rank 0 reads.
        """
        newest = collectives.broadcast_from_rank0(self._latest)
        if newest is not None:
            nodes.bring_files(newest.path, MANIFEST)
        return newest

    def _latest(self) -> Checkpoint | None:
        passed_over = len(self._passed_over)
        for path in self._steps():
            if path in self._passed_over:
                continue
            fault = damage(path)
            if fault is None:
                return Checkpoint(path, int(path.name.removeprefix("step-")))
            self._passed_over.append(path)
            logger.warning("checkpoint %s is damaged (%s): falling back to the one before it", path, fault)
        if len(self._passed_over) > passed_over:
            logger.warning("no checkpoint in %s is intact: the stage starts over", self.folder)
        return None

    def changed_code(self, checkpoint: Checkpoint) -> list[str]:
        """Files that decide the stage's numbers and have changed since the checkpoint was made."""
        return changed_code(checkpoint.path, self._code)

    def ignore_other_code(self) -> None:
        """Ignore checkpoints of other code; they are removed when the next one is saved."""
        self._passed_over += [
            path for path in self._steps() if path not in self._passed_over and changed_code(path, self._code)
        ]

    def _steps(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name)), reverse=True)

    def clear(self) -> None:
        """Remove the checkpoints: the stage is done and its outputs are in place."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, step: int, outputs: Sequence[str]) -> None:
        """Record that `outputs` (below the project's folder) are in place after `step`, then remove the checkpoints.

        If the process is killed before DVC records the outputs, the stage is started again and finds this record
        instead of training again.
        """
        digest = fingerprint({}, [self._root / output for output in outputs], self._root)
        record = {
            "fingerprint": self._fingerprint,
            "code": self._code,
            "step": step,
            "outputs": list(outputs),
            "digest": digest,
        }
        write_json(self.folder.parent / DONE, record)
        self.clear()

    def finished(self) -> int | None:
        """The last step of a run with these parameters, inputs and code whose outputs are in place unchanged; None if
        there is none.
        """
        try:
            record = json.loads(_text(self.folder.parent / DONE))
            if (record["fingerprint"], record["code"]) != (self._fingerprint, self._code):
                return None
            digest = fingerprint({}, [self._root / output for output in record["outputs"]], self._root)
            return int(record["step"]) if digest == record["digest"] else None
        # never written, truncated, or an output is gone: the stage has to run
        except (OSError, ValueError, KeyError, TypeError):
            return None


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Enter while reading a valid checkpoint that may be from another version of this project or of a library.

    Raises CheckpointError.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        if "OutOfMemory" in type(error).__name__:  # of torch, which this module does not import
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"{path} is intact but cannot be restored ({reason}): other code or another library version wrote it. "
            f"Go back to that version, or remove {path.parent} to start over."
        ) from error


def write_manifest(folder: Path) -> None:
    """Write the manifest: size and digest of every file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(path.relative_to(folder)): [path.stat().st_size, _digest(path)] for path in files}
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def damage(folder: Path) -> str | None:
    """The defect of a checkpoint, None if it has none."""
    try:
        entries = {
            str(name): (int(size), str(digest))
            for name, (size, digest) in json.loads(_text(folder / MANIFEST)).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or cut"
    if not entries:
        return f"{MANIFEST} names no file"
    for name, (size, digest) in entries.items():
        path = folder / name
        try:
            actual = path.stat().st_size if path.is_file() else None
            if actual is None:
                return f"{name} is missing"
            if actual != size:
                return f"{name} has {actual} bytes, {size} were written"
            if _digest(path) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
