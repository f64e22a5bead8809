"""Promotions and rollbacks, one at a time, each recorded with who, when and why."""

import getpass
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from config.errors import EnvironmentFault, ModelError, UserError
from config.locks import lock_file
from config.schema import Params
from config.workspace.champions import (
    CHAMPIONS,
    Champion,
    ChampionRecord,
    Event,
    champion_folder,
    read_record,
    write_record,
)
from config.workspace.kept import kept_params
from config.workspace.rows import pipeline_rows
from tasks.champions.files import gather, is_complete, run_outs
from tasks.dvc.data_key import key_of_run

KEPT = 3
"""Champions whose folders are kept: the current one and two for rollbacks."""


def require_champion(root: Path) -> Champion:
    """The champion of the project. Raises UserError if there is none yet."""
    champion = read_record(root).champion
    if champion is None:
        raise UserError(
            "there is no champion yet, so there is nothing to compare a new model with. Name one "
            "first: rlhf promote last."
        )
    return champion


def promote(root: Path, run_id: str, why: str, by: str | None = None, instead_of: str | None = None) -> ChampionRecord:
    """Make the model of a completed run the champion; the one until now becomes `previous`.

    With `instead_of`, only if that is still the champion. A run that is the champion already gets its folder back if
    files are missing.
    Raises UserError for a run that is unknown or did not complete, ModelError if an output of it is gone,
    EnvironmentFault if another promotion is running, the champion is another one by now, or the disk refuses.
    """
    with _deciding(root):
        record = read_record(root)
        before = record.champion
        if instead_of is not None and (before is None or before.run_id != instead_of):
            raise EnvironmentFault(
                f"the champion is {before.run_id if before else 'none'} now, not {instead_of}, "
                f"which run {run_id} was compared with: nothing was promoted. Run rlhf retrain again."
            )
        _require_completed(root, run_id)
        challenger = describe(root, run_id)
        _keep(root, run_id)
        if before is not None and before.run_id == run_id:
            return record
        event = Event(
            time=time.time(),
            event="promoted",
            champion=run_id,
            before=before.run_id if before else None,
            by=by or _who(),
            why=why,
        )
        lineage = (*(entry for entry in record.lineage if entry.run_id != run_id), challenger)
        return _decide(root, ChampionRecord(lineage=lineage[-KEPT:], events=(*record.events, event)))


def rollback(root: Path, why: str, by: str | None = None) -> ChampionRecord:
    """Make the previous champion the champion again; the current one leaves the lineage and can be promoted again.

    Raises UserError if there is no previous one, EnvironmentFault if its files are incomplete or another decision is
    running.
    """
    with _deciding(root):
        record = read_record(root)
        before, previous = record.champion, record.previous
        if before is None or previous is None:
            only = f"{before.run_id} is the only champion so far" if before else "there is no champion yet"
            raise UserError(
                f"{only}, so there is nothing to go back to. Promote another run instead: rlhf promote RUN."
            )
        if not is_complete(champion_folder(root, previous.run_id)):
            _keep(root, previous.run_id)
        event = Event(
            time=time.time(),
            event="rolled_back",
            champion=previous.run_id,
            before=before.run_id,
            by=by or _who(),
            why=why,
        )
        return _decide(root, ChampionRecord(lineage=record.lineage[:-1], events=(*record.events, event)))


def update_mlflow(root: Path, params: Params) -> str | None:
    """Ship rows to MLflow and update its aliases; returns one line if that failed.

    `rlhf report --sync` then does it later.
    """
    from tracking.sync import sync  # MLflow takes over a second to import

    try:
        sync(root, params)
    except EnvironmentFault as fault:
        return str(fault)
    return None


def describe(root: Path, run_id: str) -> Champion:
    """The record's entry for a run. Raises as `run_outs` does."""
    outs = run_outs(root, run_id)
    params = kept_params(root, run_id)
    return Champion(
        run_id=run_id,
        method=params.align.method,
        model_digest=outs[f"models/{params.final_stage}"].digest,
        data_version=outs["data/prepared"].digest,
        data_key=key_of_run(root, run_id, params),
    )


def _decide(root: Path, record: ChampionRecord) -> ChampionRecord:
    """Write the record, then remove the folders that it does not name."""
    write_record(root, record)
    named = {entry.run_id for entry in record.lineage}
    for folder in (root / CHAMPIONS).iterdir():
        if folder.is_dir() and folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)
    return record


def _keep(root: Path, run_id: str) -> None:
    """Write the champion's folder atomically."""
    target = champion_folder(root, run_id)
    if is_complete(target):
        return
    temporary = target.with_name(f".{run_id}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        gather(root, run_id, temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        raise EnvironmentFault(
            f"{target} cannot be written ({error.strerror}). Nothing was promoted; free some space and try again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _require_completed(root: Path, run_id: str) -> None:
    rows = [row for row in pipeline_rows(root) if row.run_id == run_id]
    if not rows:
        raise UserError(f"run {run_id} is not in runs/pipeline.jsonl. Name one that is there: rlhf promote last.")
    state = next((row.state for row in reversed(rows) if row.event == "end"), "unfinished")
    if state != "completed":
        raise ModelError(
            f"run {run_id} is {state}, and only a completed one can be promoted. Run rlhf run to complete it."
        )


def _who() -> str:
    with suppress(OSError, KeyError):
        return getpass.getuser()
    return "unknown"


@contextmanager
def _deciding(root: Path) -> Iterator[None]:
    """Hold the champion's lock. Raises EnvironmentFault if another decision is running, or the folder is not
    writable.
    """
    with lock_file(root / CHAMPIONS / ".lock") as holder:
        if holder is not None:
            raise EnvironmentFault(
                f"process {holder} is promoting or rolling back right now: nothing was "
                "changed. Try again when it is done."
            )
        yield
