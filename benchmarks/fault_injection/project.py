"""A project on the tiny recipe: run once undisturbed, then put back to where a stage is still to be done, again and
again.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.projects.checkouts import ROOT, checkout, point_remote
from config import jsonl
from config.atomic_file import write_atomically
from config.dvc_stages import dvc_name
from config.records import UsageRow, stages_of
from tasks.run.workspace import HOME, code_digest

RECIPE = ROOT / "tests" / "e2e" / "tiny.yaml"
STAGES = stages_of("ppo")
POOL = "elsewhere"
MARK = "RLHF_FAULTS_MARK"
"""Environment variable that every process has which a case has started, by whatever way."""
BUILD_SECONDS = 1200.0


class Timeline(NamedTuple):
    """How a stage's undisturbed process spent its time."""

    start_seconds: float
    """From its creation to its first row."""
    rows: int
    """Of usage.jsonl."""


class Project(NamedTuple):
    """Its folder is the same for every case: MLflow and DVC remember places."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "project"

    @property
    def remote(self) -> Path:
        return self.folder / "remote"

    @property
    def cluster(self) -> Path:
        return self.folder / "cluster"

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"

    def environment(self, mark: str) -> dict[str, str]:
        """Of everything that a case starts: none of the user's own Prefect, MLflow or DVC."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "MLFLOW_", "RLHF_", "AWS_", "DVC_"))
        }
        state = self.folder / "state"
        return inherited | {
            "DVC_GLOBAL_CONFIG_DIR": str(state / "dvc-global"),
            "DVC_SYSTEM_CONFIG_DIR": str(state / "dvc-system"),
            "DVC_SITE_CACHE_DIR": str(state / "dvc-site"),
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",  # the order of additions, and so the bits
            MARK: mark,
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli.main", *arguments]

    # ------------------------------------------------------------ the undisturbed run

    def build(self) -> None:
        """Run the pipeline undisturbed with the code of this checkout, unless that was done."""
        about = self.undisturbed / "about.json"
        if about.exists() and json.loads(about.read_text())["code"] == code_digest(HOME):
            return
        for folder in (self.undisturbed, self.root, self.remote):
            shutil.rmtree(folder, ignore_errors=True)
        checkout(self.root)
        point_remote(self.root, str(self.remote))
        command = self.command("run", "--yes", "--recipe", str(RECIPE))
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment("undisturbed"),
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the undisturbed run failed: {done.stderr[-2000:]}")
        self.undisturbed.mkdir()
        for folder in (self.root, self.remote):
            shutil.copytree(folder, self.undisturbed / folder.name, symlinks=True)
        timelines = {stage: timeline(self.root, stage)._asdict() for stage in STAGES}
        result = {"code": code_digest(HOME), "bits": bits(self.root), "timelines": timelines}
        write_atomically(about, json.dumps(result, indent=1))

    def about(self) -> dict[str, Any]:
        return dict(json.loads((self.undisturbed / "about.json").read_text()))

    # ------------------------------------------------------------ before a stage

    def put_back(self, stage: str) -> None:
        """The undisturbed project without the outputs of `stage` and of all after it, here, in the remote and on the
        nodes of the cluster, whose caches know what earlier cases have made.
        """
        shutil.rmtree(self.cluster, ignore_errors=True)
        for folder in (self.root, self.remote):
            folder.mkdir(exist_ok=True)
            for child in folder.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            shutil.copytree(self.undisturbed / folder.name, folder, symlinks=True, dirs_exist_ok=True)
        later = STAGES[STAGES.index(stage) :]
        lock = self.root / "dvc.lock"
        content = yaml.safe_load(lock.read_text())
        gone = [content["stages"].pop(dvc_name(name)) for name in later]
        lock.write_text(yaml.safe_dump(content, sort_keys=False))
        for out in (out for entry in gone for out in entry["outs"]):
            path = self.root / out["path"]
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        kept = self._objects(content["stages"].values())
        for name in self._objects(gone) - kept:
            for store in (self.root / ".dvc" / "cache", self.remote):
                (store / "files" / "md5" / name).unlink(missing_ok=True)
        shutil.rmtree(self.root / ".dvc" / "cache" / "runs", ignore_errors=True)
        for name in later:
            shutil.rmtree(self.root / "checkpoints" / name, ignore_errors=True)

    def _objects(self, entries: Any) -> set[str]:
        """Where DVC keeps the outputs of some entries of dvc.lock, files of folders included."""
        digests = {out["md5"] for entry in entries for out in entry["outs"]}
        for digest in [digest for digest in digests if digest.endswith(".dir")]:
            listing = self.undisturbed / "remote" / "files" / "md5" / digest[:2] / digest[2:]
            digests |= {item["md5"] for item in json.loads(listing.read_text())}
        return {f"{digest[:2]}/{digest[2:]}" for digest in digests}


def timeline(root: Path, stage: str) -> Timeline:
    """From the streams of a stage that ran once."""
    usage = jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows
    return Timeline(sum(row.seconds for row in usage if row.phase == "start"), len(usage))


def bits(root: Path) -> dict[str, str]:
    """Folder of models/ -> SHA-256 over the names and contents of its files."""
    result = {}
    for folder in sorted((root / "models").iterdir()):
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
        result[folder.name] = digest.hexdigest()
    return result
