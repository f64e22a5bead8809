"""Checkpoints of placed stages in the store: another node can go on from them.

checkpoints/<stage>/<fingerprint>/<run>/step-*/       the newest two of each run, each complete once its
manifest is there
checkpoints/<stage>/<fingerprint>/<run>/step-*/kept/  what a stage keeps beside its checkpoints: the best
weights so far, and their loss

Each run writes below its own name alone: two of the same parameters may be running at once.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from config.names import inner_name
from tasks.run.store import Store
from tasks.stage.progress import attempts

MANIFEST = "manifest.json"
KEPT = 2
KEPT_BESIDE = "kept"
HELD = Path(".sending")
"""Links to the files of the checkpoint that is being sent: the stage goes on, and may remove it."""
STEPS = shutil.ignore_patterns("step-*", ".*")
FINGERPRINTS = 3
"""Different parameters and inputs, of the stage's last attempts, whose checkpoints are brought."""


class CheckpointStore:
    """The checkpoints of one stage in a workspace, and those in the store."""

    def __init__(self, root: Path, stage: str, store: Store, run_id: str) -> None:
        self._root, self._store, self._run_id = root, store, run_id
        self._place = f"checkpoints/{stage}"
        rows = [row.fingerprint for row in attempts(root, stage) if row.fingerprint]
        self._fingerprints = list(dict.fromkeys(reversed(rows)))[:FINGERPRINTS]
        """Of the last attempts, newest first."""
        self._steps: dict[str, list[str]] = {}
        """Fingerprint -> steps that the store has of this run."""

    def send(self, may_go: Callable[[], bool] = lambda: True) -> None:
        """Copy new complete checkpoints to the store and leave only this run's newest there. `may_go` is asked before
        each: what goes on from a checkpoint must find the rows of the steps before it.
        """
        for manifest in sorted((self._root / self._place).glob(f"*/step-*/{MANIFEST}")):
            step, fingerprint = manifest.parent.name, manifest.parent.parent.name
            sent = self._steps.setdefault(fingerprint, [])
            if step in sent:
                continue
            held = self._root / HELD
            shutil.rmtree(held, ignore_errors=True)
            try:
                shutil.copytree(manifest.parent, held, copy_function=os.link)
                shutil.copytree(manifest.parents[1], held / KEPT_BESIDE, ignore=STEPS, copy_function=os.link)
            except (FileNotFoundError, shutil.Error):
                continue  # a newer one has taken its place meanwhile
            if not may_go():
                return
            self._store.upload(held, f"{self._prefix(fingerprint, self._run_id)}/{step}", last=MANIFEST)
            shutil.rmtree(held)
            sent.append(step)
            for old in sent[:-KEPT]:
                self._store.remove(f"{self._prefix(fingerprint, self._run_id)}/{old}")

    def restore(self) -> None:
        """Bring the newest checkpoints of the stage's last attempts; whether they fit, and which are undamaged, the
        stage decides.
        """
        for fingerprint in self._fingerprints:
            stored = sorted(self._complete(fingerprint))
            for step, run_id in stored[-KEPT:]:
                folder = self._root / self._place / fingerprint
                target = folder / inner_name(step, "checkpoint")
                self._store.download(f"{self._prefix(fingerprint, run_id)}/{step}", target)
                if (target / KEPT_BESIDE).is_dir():
                    shutil.copytree(target / KEPT_BESIDE, folder, dirs_exist_ok=True)
                    shutil.rmtree(target / KEPT_BESIDE)
            self._steps[fingerprint] = [step for step, run_id in stored if run_id == self._run_id]

    def _complete(self, fingerprint: str) -> Iterator[tuple[str, str]]:
        """(step, run) of each complete checkpoint in the store."""
        for name in self._store.names(f"{self._place}/{inner_name(fingerprint, 'fingerprint')}"):
            run_id, _, rest = name.partition("/")
            if rest.endswith(f"/{MANIFEST}") and rest.count("/") == 1:
                yield rest.partition("/")[0], run_id

    def remove(self) -> None:
        """The stage is done: the checkpoints of this run, and of those whose attempts it went on from, have done their
        work.
        """
        for fingerprint in {*self._fingerprints, *self._steps}:
            for run_id in {run_id for _, run_id in self._complete(fingerprint)}:
                self._store.remove(self._prefix(fingerprint, run_id))

    def _prefix(self, fingerprint: str, run_id: str) -> str:
        return f"{self._place}/{inner_name(fingerprint, 'fingerprint')}/{inner_name(run_id, 'run id')}"
