"""Checkpoints of placed stages in the store: for another container to go on from, also in a
workspace that knows of no earlier attempt.

checkpoints/<stage>/<fingerprint>/step-*/   the newest two, each whole once its manifest is there
checkpoints/<stage>/by-inputs/<digest>      the fingerprint that an attempt with these parameters
                                            and inputs had
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from config.dvc_stages import defined
from config.errors import EnvironmentFault
from tasks.dvc.pull import OUTSIDE
from tasks.dvc.status import value_at, yaml_of
from tasks.remote.exchange import Exchange
from tasks.stage.progress import attempts

MANIFEST = "manifest.json"
KEPT = 2


class CheckpointStore:
    """The checkpoints of one stage in a workspace, and those in the store."""

    def __init__(self, root: Path, stage: str, store: Exchange) -> None:
        self._root, self._stage, self._store = root, stage, store
        self._sent: set[str] = set()
        self._named: set[str] = set()
        self._place = f"checkpoints/{stage}"
        self._by_inputs = f"{self._place}/by-inputs/{inputs_digest(root, stage)}"

    def send(self) -> None:
        """Copy checkpoints that are whole to the store, and leave only the newest there."""
        for manifest in sorted((self._root / self._place).glob(f"*/step-*/{MANIFEST}")):
            folder = manifest.parent
            name = f"{self._place}/{folder.parent.name}/{folder.name}"
            if name in self._sent:
                continue
            try:
                self._store.upload(folder, name, last=MANIFEST)
            except (EnvironmentFault, FileNotFoundError):
                if folder.exists():
                    raise
                continue  # a newer one has taken its place meanwhile
            self._sent.add(name)
            self._name(folder.parent.name)
            of_same = sorted(
                other for other in self._sent if other.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]
            )
            for old in of_same[:-KEPT]:
                self._store.remove(old)

    def _name(self, fingerprint: str) -> None:
        if fingerprint not in self._named:
            self._store.write(self._by_inputs, fingerprint.encode())
            self._named.add(fingerprint)

    def restore(self) -> None:
        """Bring the newest checkpoint made from these parameters and inputs, else of the stage's
        last attempt; whether it fits, the stage decides by its fingerprint.
        """
        rows = attempts(self._root, self._stage)
        fingerprint = (self._store.read(self._by_inputs) or b"").decode() or (
            rows[-1].fingerprint if rows else ""
        )
        if not fingerprint:
            return
        place = f"{self._place}/{fingerprint}"
        whole = [
            name.split("/")[0]
            for name in self._store.below(place).names()
            if name.endswith(f"/{MANIFEST}")
        ]
        if whole:
            newest = max(whole)
            self._store.download(f"{place}/{newest}", self._root / place / newest)

    def remove(self) -> None:
        """The stage is done: its checkpoints have done their work."""
        for fingerprint in {
            row.fingerprint for row in attempts(self._root, self._stage) if row.fingerprint
        }:
            self._store.remove(f"{self._place}/{fingerprint}")
        self._store.remove(self._by_inputs)


def inputs_digest(root: Path, stage: str) -> str:
    """Digest (16 hex digits) of the parameters that dvc.yaml names for `stage`, and of what it
    reads: outputs by dvc.lock, other data as it is.

    Two attempts with one digest have one fingerprint, unless the sections that make it differ; a
    checkpoint that does not fit is passed over.
    """
    lock, params = (yaml_of(root / name) for name in ("dvc.lock", "params.yaml"))
    made = {
        name: entry.get("outs", [])
        for name, entry in lock.get("stages", {}).items()
        if name != OUTSIDE
    }
    outs = {out["path"]: out.get("md5") for each in made.values() for out in each}
    entry = defined(root)[stage]
    read: dict[str, Any] = {}
    for dep in entry.get("deps", []):
        if dep.endswith(".py"):
            continue
        owner = next((path for path in outs if dep == path or dep.startswith(f"{path}/")), None)
        file = root / dep
        read[dep] = (
            outs[owner]
            if owner
            else hashlib.sha256(file.read_bytes()).hexdigest()
            if file.is_file()
            else None
        )
    named = {key: value_at(params, key) for key in entry.get("params", []) if isinstance(key, str)}
    return hashlib.sha256(
        json.dumps([named, read], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
