"""The aliases `champion` and `previous` in MLflow's registry, synchronised with champions/record.json; safe to
repeat.
"""

import hashlib
import logging
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.exceptions import MlflowException

from config.records import kept_folder
from config.schema import Params
from config.workspace.champions import RECORD, Champion, champion_folder, read_record
from tracking.client import Connection, is_deleted
from tracking.lineage import register_folder, register_mlflow_model, version_of

logger = logging.getLogger(__name__)

ALIASES = ("champion", "previous")


def record_digest(root: Path) -> str:
    """Digest of the record's state; empty without a record."""
    path = root / RECORD
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def sync_aliases(connection: Connection, root: Path, params: Params, runs: dict[str, str]) -> bool:
    """Set both aliases to the versions that have the recorded models' digests, and remove an alias without a model.

    `runs` holds the MLflow run of each pipeline run. A champion becomes a version that
    `mlflow.transformers.load_model` loads, made from its own folder; if that fails, a version with its files as the
    run left them. Returns whether everything succeeded.
    """
    name, record, complete = params.tracking.registered_model, read_record(root), True
    for alias, entry in zip(ALIASES, (record.champion, record.previous), strict=True):
        version = None if entry is None else _version(connection, root, name, entry, runs)
        if version is not None:
            connection.client.set_registered_model_alias(name, alias, version)
        elif entry is None and record.events:
            _remove_alias(connection, name, alias)
        complete &= version is not None or entry is None
    return complete


def _version(connection: Connection, root: Path, name: str, entry: Champion, runs: dict[str, str]) -> str | None:
    version = version_of(connection, name, entry.model_digest, is_mlflow_model=True)
    if version is not None:
        return version
    raw = version_of(connection, name, entry.model_digest)
    folder, run_id = champion_folder(root, entry.run_id), runs.get(entry.run_id)
    if run_id is None or not folder.is_dir() or is_deleted(connection, run_id):
        return raw
    tags = {"dvc.digest": entry.model_digest, "rlhf.run_id": entry.run_id}
    with TemporaryDirectory(dir=folder.parent, prefix=".mlflow-") as temporary:
        model = Path(temporary) / "model"
        if _write_mlflow_model(root, folder, model):
            kept = kept_folder(root, entry.run_id)
            return register_mlflow_model(connection, run_id, model, name, kept, tags)
    return raw or register_folder(connection, run_id, folder, f"models/{entry.method}", name, tags)


def _write_mlflow_model(root: Path, folder: Path, target: Path) -> bool:
    """Write a champion as an MLflow model, in a process with the packages of training. Returns whether it worked."""
    command = [sys.executable, "-m", "training.export.mlflow_model"]
    command += ["--folder", str(folder), "--to", str(target)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        logger.warning("champion %s is no MLflow model: %s", folder.name, reason)
    return done.returncode == 0


def _remove_alias(connection: Connection, name: str, alias: str) -> None:
    try:
        connection.client.delete_registered_model_alias(name, alias)
    except MlflowException:  # there is neither alias nor model
        return
