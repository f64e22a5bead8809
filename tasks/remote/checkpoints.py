"""Checkpoints of remote stages in the store: another container can resume from them, even in a workspace without
earlier attempts.

checkpoints/<stage>/<fingerprint>/<run>/step-*/   the newest two of each run, each complete once its
manifest is there
checkpoints/<stage>/by-inputs/<digest>/<run>      the fingerprint that a run's attempt with these
parameters and inputs had

Each run writes below its own name alone: two of the same parameters may be running at once.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from config.differences import value_at
from config.dvc_stages import defined
from config.errors import EnvironmentFault
from config.names import inner_name
from tasks.dvc.lock_digests import OUTSIDE
from tasks.dvc.status import yaml_of
from tasks.remote.heartbeat import CONTAINER
from tasks.run.exchange import REPLY, REQUEST, Exchange
from tasks.stage.progress import attempts

MANIFEST = "manifest.json"
KEPT = 2


class StoredCheckpoints(NamedTuple):
    """Checkpoints of a run in the store."""

    steps: tuple[str, ...]
    """Names of the complete ones, oldest first."""
    fingerprint: str
    run_id: str


class CheckpointStore:
    """The checkpoints of one stage in a workspace, and those in the store."""

    def __init__(self, root: Path, stage: str, store: Exchange, run_id: str) -> None:
        self._root, self._stage, self._store, self._run_id = root, stage, store, run_id
        self._place = f"checkpoints/{stage}"
        self._by_inputs = f"{self._place}/by-inputs/{inputs_digest(root, stage)}"
        self._in_store: set[tuple[str, str]] = set()
        """(fingerprint, step) that need not be sent."""
        self._steps_in_store: dict[str, list[str]] = {}
        """Fingerprint -> steps that the store has of this run."""
        self._adopted: StoredCheckpoints | None = None
        """Checkpoints of another run that this one continues."""
        self._heartbeats_of_adopted: dict[str, bytes | None] = {}

    def send(self, before: Callable[[], None] = lambda: None) -> None:
        """Copy new complete checkpoints to the store and leave only this run's newest there. `before` is called before
        each: what goes on from a checkpoint must find the rows of the steps before it.
        """
        for manifest in sorted((self._root / self._place).glob(f"*/step-*/{MANIFEST}")):
            step, fingerprint = manifest.parent.name, manifest.parent.parent.name
            if (fingerprint, step) in self._in_store:
                continue
            before()
            try:
                self._store.upload(manifest.parent, f"{self._prefix(fingerprint, self._run_id)}/{step}", last=MANIFEST)
            except (EnvironmentFault, FileNotFoundError):
                if manifest.parent.exists():
                    raise
                continue  # a newer one has taken its place meanwhile
            self._in_store.add((fingerprint, step))
            sent = self._steps_in_store.setdefault(fingerprint, [])
            sent.append(step)
            self._store.write(f"{self._by_inputs}/{self._run_id}", fingerprint.encode())
            while len(sent) > KEPT:
                self._store.remove(f"{self._prefix(fingerprint, self._run_id)}/{sent.pop(0)}")

    def restore(self) -> None:
        """Bring the newest checkpoints that a run made from these parameters and inputs, else those of the stage's
        last attempt; whether they fit, and which of them are undamaged, the stage decides.
        """
        newest = self._newest()
        if newest is None:
            return
        for step in newest.steps[-KEPT:]:
            step = inner_name(step, "checkpoint")
            target = self._root / self._place / newest.fingerprint / step
            self._store.download(f"{self._prefix(newest.fingerprint, newest.run_id)}/{step}", target)
            self._in_store.add((newest.fingerprint, step))
        if newest.run_id == self._run_id:
            self._steps_in_store[newest.fingerprint] = list(newest.steps)
        else:
            self._adopted, self._heartbeats_of_adopted = newest, self._heartbeats(newest.run_id)

    def remove(self) -> None:
        """The stage is done: its checkpoints have done their work, also those of earlier runs of its checkout, and of
        one that it went on from unless that is still running.
        """
        done = {(row.fingerprint, row.run_id) for row in attempts(self._root, self._stage) if row.fingerprint}
        done |= {(fingerprint, self._run_id) for fingerprint in self._steps_in_store}
        if self._adopted is not None and not self._is_at_work(self._adopted.run_id):
            done.add((self._adopted.fingerprint, self._adopted.run_id))
        folders = {tuple(name.split("/")[:2]) for name in self._store.below(self._place).names()}
        for fingerprint, run_id in done & folders:
            self._store.remove(self._prefix(fingerprint, run_id))
        for run_id in set(self._store.below(self._by_inputs).names()) & {run_id for _, run_id in done}:
            self._store.remove(f"{self._by_inputs}/{run_id}")

    def _prefix(self, fingerprint: str, run_id: str) -> str:
        fingerprint = inner_name(fingerprint, "fingerprint")
        return f"{self._place}/{fingerprint}/{inner_name(run_id, 'run id')}"

    def _newest(self) -> StoredCheckpoints | None:
        """The run with these inputs that got furthest, preferably this one."""
        named = self._store.below(self._by_inputs)
        owners = {(content.decode(), run_id) for run_id in named.names() if (content := named.read(run_id))}
        rows = [row for row in attempts(self._root, self._stage) if row.fingerprint]
        last = {(rows[-1].fingerprint, rows[-1].run_id)} if rows else set()
        complete = self._complete(owners) or self._complete(last)
        return max(
            complete, key=lambda checkpoint: (checkpoint.steps[-1], checkpoint.run_id == self._run_id), default=None
        )

    def _complete(self, owners: set[tuple[str, str]]) -> list[StoredCheckpoints]:
        """Complete checkpoints in the store of each (fingerprint, run)."""
        checkpoints = []
        for fingerprint, run_id in sorted(owners):
            names = self._store.below(self._prefix(fingerprint, run_id)).names()
            steps = tuple(sorted(name.split("/")[0] for name in names if name.endswith(f"/{MANIFEST}")))
            if steps:
                checkpoints.append(StoredCheckpoints(steps, fingerprint, run_id))
        return checkpoints

    def _heartbeats(self, run_id: str) -> dict[str, bytes | None]:
        """Exchange of each container of a run without a reply -> its last heartbeat."""
        exchanges = self._store.below(f"exchange/{run_id}")
        names = exchanges.names()
        requests = {name.rpartition("/")[0] for name in names if name.endswith(f"/{REQUEST}")}
        return {name: exchanges.read(f"{name}/{CONTAINER}") for name in requests if f"{name}/{REPLY}" not in names}

    def _is_at_work(self, run_id: str) -> bool:
        """Whether a container of another run has sent a heartbeat since this one began."""
        return any(
            heartbeat != self._heartbeats_of_adopted.get(name) for name, heartbeat in self._heartbeats(run_id).items()
        )


def inputs_digest(root: Path, stage: str) -> str:
    """Digest (16 hex digits) of the parameters that dvc.yaml names for `stage`, and of what it reads: outputs by
    dvc.lock, other data as it is.

    Not the fingerprint itself: a pipeline that places a stage has not pulled what the stage reads, and knows it by
    DVC's digests alone. Two attempts with one digest have one fingerprint, unless the sections that make it differ; a
    checkpoint that does not fit is passed over.
    """
    lock, params = (yaml_of(root / name) for name in ("dvc.lock", "params.yaml"))
    entries = {name: entry.get("outs", []) for name, entry in lock.get("stages", {}).items() if name != OUTSIDE}
    outs = {out["path"]: out.get("md5") for entry in entries.values() for out in entry}
    entry = defined(root)[stage]
    read: dict[str, Any] = {}
    for dep in entry.get("deps", []):
        if dep.endswith(".py"):
            continue
        owner = next((path for path in outs if dep == path or dep.startswith(f"{path}/")), None)
        file = root / dep
        read[dep] = outs[owner] if owner else hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    named = {key: value_at(params, key) for key in entry.get("params", []) if isinstance(key, str)}
    return hashlib.sha256(json.dumps([named, read], sort_keys=True, default=str).encode()).hexdigest()[:16]
