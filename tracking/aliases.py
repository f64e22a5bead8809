"""The aliases `champion` and `previous` in MLflow's registry, brought in line with
champions/record.json: safe to repeat, at any time.
"""

import hashlib
from pathlib import Path

from mlflow.exceptions import MlflowException

from config.schema import Params
from config.workspace.champions import RECORD, Champion, champion_folder, read_record
from tracking.client import Connection, is_deleted
from tracking.lineage import register_folder, version_of

ALIASES = ("champion", "previous")


def record_digest(root: Path) -> str:
    """Names the state of the record; empty without one."""
    path = root / RECORD
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def bring_in_line(connection: Connection, root: Path, params: Params, runs: dict[str, str]) -> bool:
    """Set both aliases to the versions that have the recorded models' digests, and take away one
    that stands for nobody.

    `runs` holds the MLflow run of each pipeline run: a champion that was never registered, as
    MLflow was down then, is registered from its own folder. Returns whether all of it could be
    done.
    """
    name, record, complete = params.tracking.registered_model, read_record(root), True
    for alias, entry in zip(ALIASES, (record.champion, record.previous), strict=True):
        version = None if entry is None else _version(connection, root, name, entry, runs)
        if version is not None:
            connection.client.set_registered_model_alias(name, alias, version)
        elif entry is None and record.events:
            _take_away(connection, name, alias)
        complete &= version is not None or entry is None
    return complete


def _version(
    connection: Connection, root: Path, name: str, entry: Champion, runs: dict[str, str]
) -> str | None:
    found = version_of(connection, name, entry.model_digest)
    folder = champion_folder(root, entry.run_id)
    if (
        found is not None
        or entry.run_id not in runs
        or not folder.is_dir()
        or is_deleted(connection, runs[entry.run_id])
    ):
        return found
    tags = {"rlhf.run_id": entry.run_id}
    return register_folder(
        connection,
        runs[entry.run_id],
        folder,
        f"models/{entry.method}",
        name,
        entry.model_digest,
        tags,
    )


def _take_away(connection: Connection, name: str, alias: str) -> None:
    try:
        connection.client.delete_registered_model_alias(name, alias)
    except MlflowException:  # there is neither alias nor model
        return
