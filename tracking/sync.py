"""Ships new rows of this workspace to MLflow, during a run or later; nothing else writes to MLflow.

A parent MLflow run per pipeline run, below it one per stage attempt. Everything is read from files
(runs/pipeline.jsonl, the streams of the stages, the run's own copies), so MLflow need not be up when they are written.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Metric
from pydantic import BaseModel, ValidationError

from config.compose import flat
from config.errors import EXIT_DONE, EXIT_RESUMABLE, RlhfError
from config.records import NO_RUN_ID, STAGES, AttemptRow, MetricRow, PipelineRow, UsageRow, kept_folder
from config.schema import Params
from config.workspace.benchmarked import read_benchmarked
from config.workspace.kept import completed_stages, kept_file, kept_params
from config.workspace.quantised import read_quantised
from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, Contest, RetrainRow
from config.workspace.rows import PIPELINE, pipeline_rows
from costs.ledger.ledger import read_ledger
from costs.ledger.reconcile import read_plan, reconcile
from costs.tables.price import kwh, stage_price
from tracking.aliases import record_digest, sync_aliases
from tracking.client import Connection, connect, ensure_run, is_deleted, log, log_inputs, named_faults, unless_deleted
from tracking.cursor import Cursor, cursor_path, exclusive, load, save
from tracking.labels import CHANGED_TAG, KIND_TAG, changes, description, nickname, params_before, source
from tracking.lineage import datasets, log_benchmarks, log_evidence, log_quantised, log_samples, register
from tracking.rows import (
    bought_metrics,
    contest_metrics,
    cost_metrics,
    final_metrics,
    plan_metrics,
    so_far,
    training_metrics,
    usage_metrics,
)

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
RETRAIN = RETRAIN_ROWS.name
STATUS = {"completed": "FINISHED", "stopped": "KILLED", "over_budget": "KILLED", "killed": "KILLED"}
"""State of a pipeline run -> MLflow status; any other is FAILED."""


def sync(root: Path, params: Params, at_work: str | None = None) -> int:
    """Ship all rows that `params.tracking` has not seen; doing it again, or being killed in between, changes nothing.

    Returns how many rows there were. `at_work` names a pipeline run whose results are still being written: its end is
    left for the next time.
    Raises EnvironmentFault if MLflow does not take them; they stay where they are.
    """
    path = cursor_path(root, params.tracking.uri)
    with exclusive(path), named_faults(params.tracking.uri):
        return Shipment(root, params, connect(root, params.tracking), path).ship(at_work)


def study_key(name: str) -> str:
    """Key of the parent run of a study's runs."""
    return f"study/{name}"


def log_study(root: Path, params: Params, name: str, files: Sequence[Path]) -> None:
    """Add files to the parent run of the study in the workspace `root`, once a run of it has been shipped. Raises
    EnvironmentFault if MLflow does not take them.
    """
    run = load(cursor_path(root, params.tracking.uri)).runs.get(study_key(name))
    if run is not None:
        with named_faults(params.tracking.uri):
            connection = connect(root, params.tracking)
            with unless_deleted(connection, run):
                for file in files:
                    connection.client.log_artifact(run, str(file))


class Shipment:
    """One pass over the files."""

    def __init__(self, root: Path, params: Params, connection: Connection, path: Path) -> None:
        self._root, self._params, self._connection, self._path = root, params, connection, path
        self._cursor: Cursor = load(path)
        self._cursor.experiment_id = connection.experiment_id
        self._rows = 0
        self._kept_params: dict[str, Params] = {}

    def ship(self, at_work: str | None) -> int:
        follower = self._cursor.follower(self._root, PIPELINE.name)
        pipeline, offset = [], follower.offset
        for row in follower.read(PipelineRow):
            if row.event == "end" and row.run_id == at_work:
                break
            pipeline.append(row)
            offset = follower.offset
        for row in pipeline:
            if row.event == "start":
                self._start_run(row)
        for stage in STAGES:
            self._ship_stage(stage)
        for row in pipeline:
            if row.event == "stage":
                self._note_stage(row)
            elif row.event == "end":
                self._end_run(row)
        contests = self._ship_contests()
        self._rows += len(pipeline)
        self._cursor.offsets |= {PIPELINE.name: offset, RETRAIN: contests}
        save(self._cursor, self._path)
        self._name_champions()
        self._ship_measured_later()
        return self._rows

    def _name_champions(self) -> None:
        """Update the registry's aliases from the champions record; what is not possible yet is retried with the next
        rows.
        """
        digest = record_digest(self._root)
        if digest != self._cursor.champions and sync_aliases(
            self._connection, self._root, self._params, self._cursor.runs
        ):
            self._cursor.champions = digest
            save(self._cursor, self._path)

    def _ship_measured_later(self) -> None:
        """Add what exports and benchmarks measured after a run to the run and its model versions; again after a
        promotion, which creates a version.
        """
        self._ship_kept(read_quantised, log_quantised, self._cursor.quantised)
        self._ship_kept(read_benchmarked, log_benchmarks, self._cursor.benchmarked)

    def _ship_kept(
        self,
        read: Callable[[Path, str], M | None],
        ship: Callable[[Connection, str, str, M], None],
        shipped: dict[str, str],
    ) -> None:
        for run_id, mlflow_run in self._cursor.runs.items():
            kept = None if "/" in run_id else read(self._root, run_id)
            if kept is None:
                continue
            digest = hashlib.sha256(kept.model_dump_json().encode()).hexdigest()
            state = f"{digest} {self._cursor.champions}"
            is_new = shipped.get(run_id) != state
            if is_new and not is_deleted(self._connection, mlflow_run):
                name = self._params_of(run_id).tracking.registered_model
                ship(self._connection, mlflow_run, name, kept)
                shipped[run_id] = state
                save(self._cursor, self._path)

    # ------------------------------------------------------------ pipeline runs

    def _start_run(self, row: PipelineRow) -> None:
        origin = {key: str(value) for key, value in row.detail.items() if isinstance(value, str | bool)}
        if study := origin.pop("study", ""):
            study_run = self._run(study_key(study), f"study {study}", row.time, {KIND_TAG: "study"})
            origin["mlflow.parentRunId"] = study_run
        run = self._parent(row.run_id, row.time, origin)
        content = self._params_of(row.run_id).model_dump(mode="json")
        params = {key: str(value) for key, value in flat(content)}
        log(
            self._connection,
            run,
            params=list(params.items()),
            tags={CHANGED_TAG: changes(params_before(self._connection, row.time), params)},
        )

    def _note_stage(self, row: PipelineRow) -> None:
        """The outputs that a stage contributed, and its inputs."""
        state = "unchanged" if row.cached else "made"
        made_by = f"{state}, attempt {row.attempt}" if row.attempt is not None else state
        if origin := row.detail.get("made_by"):
            made_by += f", by run {origin['run_id']}"
        parent = self._parent(row.run_id, row.time)
        log(self._connection, parent, tags={f"stage.{row.stage}": made_by})
        origin = self._origin(row.run_id)
        if row.stage == "data":
            prepared = {
                path: digest for path, digest in row.detail.get("outs", {}).items() if path.startswith("data/")
            }
            log_inputs(self._connection, parent, datasets(prepared, origin, "prepared"))
        child = self._cursor.runs.get(f"{row.run_id}/{row.stage}/{row.attempt}")
        read = row.detail.get("deps", {})
        if child and read and not row.cached:
            log_inputs(self._connection, child, datasets(read, origin, row.stage))

    def _end_run(self, row: PipelineRow) -> None:
        """Results, evidence and model; then end everything of this run that MLflow shows as running."""
        run_id, folder = self._parent(row.run_id, row.time), kept_folder(self._root, row.run_id)
        if not is_deleted(self._connection, run_id):
            self._ship_results(row, run_id, folder)
        for key in [key for key in self._cursor.open if key.startswith(f"{row.run_id}/")]:
            self._close(key, "KILLED", row.time)
        self._close(row.run_id, STATUS.get(row.state, "FAILED"), row.time)
        for key in [key for key in self._cursor.runs if key.startswith(study_key(""))]:
            self._close(key, "FINISHED", row.time)  # until its next run ends

    def _ship_results(self, row: PipelineRow, run_id: str, folder: Path) -> None:
        params = self._params_of(row.run_id)
        results = self._results(row.run_id)
        ledger = read_ledger(self._root, params, row.run_id)
        metrics = (
            final_metrics(results, row.time)
            + cost_metrics(ledger, row.time)
            + bought_metrics(results["evaluate"], ledger, row.time)
        )
        energy = kwh({stage.stage: stage.device_seconds for stage in ledger.stages}, params)
        metrics += plan_metrics(reconcile(read_plan(folder), ledger), energy, row.time)
        log(self._connection, run_id, metrics=metrics)
        log_evidence(self._connection, run_id, folder)
        samples = log_samples(self._connection, run_id, folder)
        log(self._connection, run_id, tags={**description(run_id, folder), **samples})
        if row.state == "completed":
            tags = {"rlhf.run_id": row.run_id, **self._origin(row.run_id)}
            log(self._connection, run_id, tags=register(self._connection, run_id, self._root, params, folder, tags))

    def _results(self, run_id: str) -> dict[str, dict[str, Any]]:
        """The metrics of the stages that the run completed; empty for all others."""
        results: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
        for stage, outs in completed_stages(self._root, run_id).items():
            name = f"metrics/{stage}.json"
            path = kept_file(self._root, run_id, name, outs.get(name))
            results[stage] = json.loads(path.read_text(encoding="utf-8")) if path else {}
        return results

    def _params_of(self, run_id: str) -> Params:
        """The run's own params: its prices are part of its rows, and must be the same when they are shipped again."""
        if run_id not in self._kept_params:
            try:
                self._kept_params[run_id] = kept_params(self._root, run_id)
            except RlhfError:
                self._kept_params[run_id] = self._params
        return self._kept_params[run_id]

    def _origin(self, run_id: str) -> dict[str, str]:
        rows = pipeline_rows(self._root)
        detail: dict[str, str] = next(
            (row.detail for row in rows if row.run_id == run_id and row.event == "start"), {}
        )
        return {key: detail[key] for key in ("dvc.remote", "git.commit") if key in detail}

    def _ship_contests(self) -> int:
        """Results of retrain cycles for runs they compared with the champion; returns the offset up to which their
        rows were read.
        """
        follower = self._cursor.follower(self._root, RETRAIN)
        for row in follower.read(RetrainRow):
            path = self._root / RETRAIN_FOLDER / row.cycle / "contest.json"
            if row.event != "end" or row.run_id is None or not path.exists():
                continue
            try:
                contest = Contest.model_validate_json(path.read_bytes())
            except ValidationError as error:
                logger.warning("%s is not shipped, as it cannot be read: %s", path, str(error).splitlines()[0])
                continue
            metrics = contest_metrics(contest, row.detail.get("usd", 0.0), row.time)
            tags = {
                "rlhf.retrain": f"{row.outcome}: {row.said}",
                "rlhf.compared_with": str(row.detail.get("champion")),
            }
            log(self._connection, self._parent(row.run_id, row.time), metrics=metrics, tags=tags)
        return follower.offset

    # ------------------------------------------------------------ attempts

    def _ship_stage(self, stage: str) -> None:
        attempts = self._cursor.follower(self._root, f"{stage}/attempts.jsonl")
        ends = []
        for row in attempts.read(AttemptRow):
            self._rows += 1
            if row.event == "end":
                ends.append(row)
            else:
                self._child(stage, row.run_id, row.attempt, row.time)
        self._ship_metrics(stage)
        for row in ends:
            self._end_attempt(stage, row)
        self._cursor.offsets[f"{stage}/attempts.jsonl"] = attempts.offset
        save(self._cursor, self._path)

    def _ship_metrics(self, stage: str) -> None:
        """The rows of both streams, grouped by the attempt they belong to."""
        metrics = self._cursor.follower(self._root, f"{stage}/metrics.jsonl")
        usage = self._cursor.follower(self._root, f"{stage}/usage.jsonl")
        batches: dict[tuple[str, int], list[Metric]] = defaultdict(list)
        begins: dict[tuple[str, int], float] = {}
        price = cache(lambda run_id: stage_price(self._params_of(run_id), stage))
        spent = dict(self._cursor.spent)
        rows: list[MetricRow | UsageRow] = [*metrics.read(MetricRow), *usage.read(UsageRow)]
        for row in rows:
            owner = (row.run_id, row.attempt)
            begins.setdefault(owner, row.time)
            if isinstance(row, MetricRow):
                batches[owner] += training_metrics(stage, row)
            else:
                key = f"{row.run_id}/{stage}/{row.attempt}"
                spent[key] = spent.get(key, 0.0) + price(row.run_id).usd_of_rows([row])
                batches[owner] += [*usage_metrics(row, price(row.run_id)), so_far(row, spent[key])]
            self._rows += 1
        for (run_id, attempt), batch in batches.items():
            log(self._connection, self._child(stage, run_id, attempt, begins[run_id, attempt]), metrics=batch)
        if batches:
            self._cursor.spent = spent
            self._cursor.offsets |= {f"{stage}/metrics.jsonl": metrics.offset, f"{stage}/usage.jsonl": usage.offset}
            save(self._cursor, self._path)

    def _end_attempt(self, stage: str, row: AttemptRow) -> None:
        run_id = self._child(stage, row.run_id, row.attempt, row.time)
        tags = {"rlhf.exit_code": str(row.exit_code), "rlhf.fingerprint": row.fingerprint, "rlhf.device": row.device}
        log(self._connection, run_id, tags=tags | ({"rlhf.message": row.message} if row.message else {}))
        status = {EXIT_DONE: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(row.exit_code or EXIT_DONE, "FAILED")
        self._close(f"{row.run_id}/{stage}/{row.attempt}", status, row.time)
        if row.run_id == NO_RUN_ID:  # nothing else records the end of a stage started by hand
            self._close(NO_RUN_ID, status, row.time)

    # ------------------------------------------------------------ MLflow runs

    def _parent(self, run_id: str, time: float, origin: Mapping[str, str] | None = None) -> str:
        name = "by hand" if run_id == NO_RUN_ID else f"{nickname(run_id)} ({self._params_of(run_id).align.method})"
        return self._run(run_id, name, time, {KIND_TAG: "run", "rlhf.run_id": run_id, **source(origin or {})})

    def _child(self, stage: str, run_id: str, attempt: int, time: float) -> str:
        tags = {
            "mlflow.parentRunId": self._parent(run_id, time),
            KIND_TAG: "stage",
            "rlhf.run_id": run_id,
            "rlhf.stage": stage,
            "rlhf.attempt": str(attempt),
        }
        key = f"{run_id}/{stage}/{attempt}"
        if key not in self._cursor.runs:
            for older in [other for other in self._cursor.open if other.startswith(f"{run_id}/{stage}/")]:
                # its end was never recorded, and only one process works on a stage at a time
                self._close(older, "KILLED", time)
            if run_id == NO_RUN_ID:
                self._reopen(NO_RUN_ID)
        name = f"{stage} {'by hand' if run_id == NO_RUN_ID else f'of {nickname(run_id)}'}"
        return self._run(key, name if attempt == 1 else f"{name} (attempt {attempt})", time, tags)

    def _run(self, key: str, name: str, time: float, tags: dict[str, str]) -> str:
        if key not in self._cursor.runs:
            # a server may be shared by several workspaces
            workspace = hashlib.sha256(str(self._root.resolve()).encode()).hexdigest()[:8]
            self._cursor.runs[key] = ensure_run(self._connection, f"{workspace}/{key}", name, time, tags)
            self._cursor.open.append(key)
        return self._cursor.runs[key]

    def _reopen(self, key: str) -> None:
        """Show a run as running again; it may have ended before."""
        run_id = self._cursor.runs[key]
        with unless_deleted(self._connection, run_id):
            self._connection.client.update_run(run_id, status="RUNNING")
        if key not in self._cursor.open:
            self._cursor.open.append(key)

    def _close(self, key: str, status: str, time: float) -> None:
        run_id = self._cursor.runs[key]
        with unless_deleted(self._connection, run_id):
            self._connection.client.set_terminated(run_id, status, end_time=round(time * 1000))
        if key in self._cursor.open:
            self._cursor.open.remove(key)
