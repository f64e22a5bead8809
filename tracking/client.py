"""A connection to MLflow, and calls that are safe to repeat."""

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST, ErrorCode

from config.errors import EnvironmentFault
from config.sections.run import Tracking
from config.workspace.login import MLFLOW_KEY, MLFLOW_USER, key, mlflow_password
from tracking.runs_view import VIEW_TAG, view

logger = logging.getLogger(__name__)

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
PARAM_CHARS = 6000
"""Limits of MLflow's log_batch and of a parameter's value."""

TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"
TIMEOUT_SECONDS, UPLOAD_TIMEOUT_SECONDS = 10, 3600
"""Seconds to wait for an answer. A server that stores artifacts elsewhere answers an upload only when they are
there.
"""

USER_VARIABLE, PASSWORD_VARIABLE, TOKEN_VARIABLE = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)

KEY_TAG = "rlhf.key"
"""Tag with the key of what an MLflow run represents, so that it is found again and never created twice."""

GUIDE = """\
Runs of the RLHF pipeline, one below the other; each opens to the attempts of its stages.

- whole runs: `tags."rlhf.kind" = 'run'`
- those that gained: `metrics."eval/win_rate" > 0.5`, sorted by `cost/usd_per_win_rate_point`
- what a run changed against the one before it: column `rlhf.changed`
- cost against win rate: scatter of `cost/made_usd` and `eval/win_rate`

docs/mlflow.md has more of them, chart by chart.
"""
"""The experiment's description in MLflow."""


ARTIFACT_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Where MLflow's database has absolute paths of artifacts: table and column."""


class Connection(NamedTuple):
    client: MlflowClient
    experiment_id: str


def artifact_location(root: Path, uri: str) -> str | None:
    """Where artifacts go: a database has no store for them, so beside an SQLite file, which several workspaces may
    share, and for any other database in the project; None leaves it to a server.
    """
    if uri.startswith("http"):
        return None
    database = uri.removeprefix("sqlite:///")
    folder = root if database == uri else Path(database).parent
    return (folder / "mlartifacts").resolve().as_uri()


def resolved_uri(root: Path, uri: str) -> str:
    """`uri` with a relative SQLite path resolved against the project's folder."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(f"{prefix}/"):
        return f"{prefix}{(root / uri.removeprefix(prefix)).resolve()}"
    return uri


@contextmanager
def named_faults(uri: str) -> Iterator[None]:
    """Turn any failure of the tracker into an EnvironmentFault of one line."""
    try:
        yield
    except EnvironmentFault:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise EnvironmentFault(
            f"MLflow at tracking.uri={uri} does not take rows: {type(error).__name__}: {reason}. "
            "Start it or change the URI in params.yaml, then run rlhf report --sync; nothing is lost."
        ) from error


def connect(root: Path, tracking: Tracking) -> Connection:
    """Open the tracker and find or create the experiment; the first time a database is created, which takes many
    seconds.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault(TIMEOUT_VARIABLE, str(TIMEOUT_SECONDS))
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uri = resolved_uri(root, tracking.uri)
    log_in(root, uri)
    create_database(uri)
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name(tracking.experiment)
    if experiment is None:
        local = artifact_location(root, uri)
        tags = {"mlflow.experimentKind": "custom_model_development", "mlflow.note.content": GUIDE, VIEW_TAG: view()}
        try:
            return Connection(
                client, client.create_experiment(tracking.experiment, artifact_location=local, tags=tags)
            )
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
                raise
            experiment = client.get_experiment_by_name(tracking.experiment)
    local = artifact_location(root, uri)
    if local is not None and experiment.artifact_location != local and uri.startswith("sqlite:///"):
        follow_move(Path(uri.removeprefix("sqlite:///")), experiment.artifact_location, local)
    if experiment.lifecycle_stage != "active":
        raise EnvironmentFault(
            f"tracking.experiment={tracking.experiment} was deleted in MLflow. Restore it there, "
            "or name another one in params.yaml."
        )
    if experiment.tags.get(VIEW_TAG) != view():
        client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, view())
    return Connection(client, experiment.experiment_id)


def follow_move(database: Path, before: str, now: str) -> None:
    """Name artifacts by the place where they are, after a database was moved or copied together with them: MLflow
    keeps their absolute paths. A location of another name was chosen by someone, and stays.
    """
    if not before.startswith("file://") or Path(before).name != Path(now).name:
        return
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in ARTIFACT_COLUMNS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
                (now, len(before) + 1, len(before) + 1, f"{before}/"),
            )
    logger.info("this project was at %s before: MLflow names its artifacts below %s now", before, now)


def log_in(root: Path, uri: str) -> None:
    """Let MLflow's client send the password of this project's server to that server only. Credentials in the
    environment take precedence.
    """
    if os.environ.get(USER_VARIABLE, MLFLOW_USER) != MLFLOW_USER or TOKEN_VARIABLE in os.environ:
        return
    password = mlflow_password(root, uri)
    if password is not None:
        os.environ |= {USER_VARIABLE: MLFLOW_USER, PASSWORD_VARIABLE: password}
    elif (root / MLFLOW_KEY).exists() and os.environ.get(PASSWORD_VARIABLE) == key(root / MLFLOW_KEY):
        del os.environ[USER_VARIABLE], os.environ[PASSWORD_VARIABLE]


def create_database(uri: str) -> None:
    """Create a missing SQLite database atomically: MLflow cannot open one whose creation was interrupted."""
    target = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        database = Path(folder) / target.name
        MlflowClient(f"sqlite:///{database}").search_experiments()
        database.replace(target)


def ensure_run(connection: Connection, key: str, name: str, start: float, tags: Mapping[str, str]) -> str:
    """The MLflow run for `key`, created if needed. `start` in seconds since the epoch."""
    client, experiment_id = connection
    runs = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    run = client.create_run(experiment_id, start_time=round(start * 1000), tags={KEY_TAG: key, **tags}, run_name=name)
    return str(run.info.run_id)


def is_deleted(connection: Connection, run_id: str) -> bool:
    """Whether a run was deleted in MLflow, or even removed from its database."""
    try:
        return str(connection.client.get_run(run_id).info.lifecycle_stage) == LifecycleStage.DELETED
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return True
        raise


@contextmanager
def unless_deleted(connection: Connection, run_id: str) -> Iterator[None]:
    """Skip what the block ships if the run was deleted in MLflow; other runs' rows still ship."""
    try:
        yield
    except MlflowException:
        if not is_deleted(connection, run_id):
            raise
        logger.info("run %s was deleted in MLflow: what is new of it is not shipped", run_id)


@contextmanager
def uploading() -> Iterator[None]:
    """Wait longer for an answer within the block: it comes only once a whole file is stored."""
    before = os.environ.get(TIMEOUT_VARIABLE)
    os.environ[TIMEOUT_VARIABLE] = str(max(int(before or 0), UPLOAD_TIMEOUT_SECONDS))
    try:
        yield
    finally:
        if before is None:
            del os.environ[TIMEOUT_VARIABLE]
        else:
            os.environ[TIMEOUT_VARIABLE] = before


def log_inputs(connection: Connection, run_id: str, inputs: Sequence[DatasetInput]) -> None:
    """Datasets that a run has read or made."""
    with unless_deleted(connection, run_id):
        connection.client.log_inputs(run_id, list(inputs))


def log_folder(connection: Connection, run_id: str, folder: Path, place: str | None = None) -> None:
    """Log all files of a folder as artifacts, of any size."""
    with uploading(), unless_deleted(connection, run_id):
        connection.client.log_artifacts(run_id, str(folder), place)


def log(
    connection: Connection,
    run_id: str,
    metrics: Sequence[Metric] = (),
    params: Sequence[tuple[str, str]] = (),
    tags: Mapping[str, str] | None = None,
) -> None:
    """Metrics, parameters and tags in as few calls as MLflow's limits allow; skipped if the run was deleted in
    MLflow.
    """
    client = connection.client
    with unless_deleted(connection, run_id):
        for begin in range(0, len(metrics), METRICS_PER_CALL):
            client.log_batch(run_id, metrics=metrics[begin : begin + METRICS_PER_CALL])
        for begin in range(0, len(params), PARAMS_PER_CALL):
            client.log_batch(
                run_id,
                params=[Param(key, value[:PARAM_CHARS]) for key, value in params[begin : begin + PARAMS_PER_CALL]],
            )
        if tags:
            client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
