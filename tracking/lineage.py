"""From the digest of the data to the model's alias: datasets, artifacts and the registered model of a run."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from config import jsonl
from config.dvc_stages import out_digest
from config.records import SUMMARY
from config.schema import Params
from config.workspace.benchmarked import Benchmarked
from config.workspace.quantised import FILE, Quantised
from tracking.client import Connection, log, log_folder, unless_deleted
from tracking.rows import serving_line, serving_metrics, serving_name, serving_rows

SAMPLES, SERVED_TABLE = "samples.json", "served.json"
SERVED_TITLE = "### Served"
"""Heading of the last part of a model version's page."""
CHALLENGER = "challenger"
ADAPTER_CONFIG = "adapter_config.json"
FLAVOR = "mlflow_model"
"""Artifact folder of a model that MLflow can load, and the tag of its versions."""
LOAD_FILES = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = mlflow.artifacts.download_artifacts("models:/{name}/{version}"){inner}
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
"""
LOAD_PIPELINE = """\

generator = mlflow.transformers.load_model("models:/{name}/{version}")
generator([{{"role": "user", "content": "Hello"}}])
"""
DIGEST_CHARS = 36
"""MLflow's limit; a DVC folder digest (32 hex digits and .dir) just fits."""


def datasets(digests: Mapping[str, str], origin: Mapping[str, str], context: str) -> list[DatasetInput]:
    """Dataset inputs of an MLflow run from DVC digests. `origin` holds the remote and the revision; they become
    tags.
    """
    tags = [InputTag("mlflow.data.context", context), *(InputTag(key, value) for key, value in origin.items())]
    return [
        DatasetInput(
            Dataset(
                name=path, digest=digest[:DIGEST_CHARS], source_type="dvc", source=json.dumps({"path": path, **origin})
            ),
            tags,
        )
        for path, digest in digests.items()
    ]


def log_evidence(connection: Connection, run_id: str, folder: Path) -> None:
    """The run's own copies: params.yaml, dvc.lock, metrics, plots, report."""
    if folder.is_dir():
        log_folder(connection, run_id, folder)


def log_samples(connection: Connection, run_id: str, folder: Path) -> dict[str, str]:
    """The run's sample replies as a table, which MLflow shows and compares across runs; the tags that name it, none if
    the run has no samples. Doing it again stores the same.
    """
    path = folder / "evaluation" / "samples.jsonl"
    if not path.is_file():
        return {}
    rows = list(jsonl.plain(path))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}
    with unless_deleted(connection, run_id):
        connection.client.log_dict(run_id, table, SAMPLES)
    return {MLFLOW_LOGGED_ARTIFACTS: json.dumps([{"path": SAMPLES, "type": "table"}])}


def version_page(folder: Path, load: str) -> str:
    """Text of a version's page: the results of the run, and how to load the model."""
    path = folder / SUMMARY
    summary = path.read_text(encoding="utf-8") if path.exists() else ""
    text = "\n".join(line for line in summary.splitlines() if not line.startswith("!["))
    return f"{text.strip()}\n\n### Load it\n\n```python\nimport mlflow\n{load}```\n"


def register(
    connection: Connection, run_id: str, root: Path, params: Params, folder: Path, tags: Mapping[str, str]
) -> dict[str, str]:
    """Log the final model of the run and register it as the challenger; the tags to put on
    the run.

    An adapter is logged with its bases in this project, each by its place there, so that the names it has for them
    hold; the version's tag `rlhf.model_folder` says which of the folders is the model. Content that is already
    registered gets no second version. A model that a later run has replaced, or whose files differ from what dvc.lock
    says, can no longer be logged.
    """
    client, name = connection.client, params.tracking.registered_model
    path = f"models/{params.final_stage}"
    digest = out_digest(folder / "dvc.lock", params.final_stage, path)
    if digest is None:
        return {}
    version = version_of(connection, name, digest)
    if version is None:
        places = model_folders(root, path)
        for place in places:
            expected = out_digest(folder / "dvc.lock", Path(place).name, place)
            if not (root / place).is_dir() or (expected is not None and content_digest(root / place) != expected):
                return {"rlhf.model": f"not registered: {place} was replaced before this run was shipped"}
        version = register_folder(connection, run_id, root, path, name, {"dvc.digest": digest, **tags})
        inner = f' + "/{path}"' if len(places) > 1 else ""
        load = LOAD_FILES.format(name=name, version=version, inner=inner)
        client.update_model_version(name, version, version_page(folder, load))
    client.set_registered_model_alias(name, CHALLENGER, version)
    return {"rlhf.model": f"{name} version {version}", "dvc.model_digest": digest}


def register_folder(
    connection: Connection, run_id: str, root: Path, path: str, name: str, tags: Mapping[str, str]
) -> str:
    """Log the model at `path` below `root`, with the base of an adapter, and make a version of it; returns its
    number.
    """
    places = model_folders(root, path)
    for place in places:
        log_folder(connection, run_id, root / place, f"model/{place}" if len(places) > 1 else "model")
    tags = {**tags, **({"rlhf.model_folder": path} if len(places) > 1 else {})}
    return _make_version(connection, run_id, "model", name, tags)


def register_mlflow_model(
    connection: Connection, run_id: str, model: Path, name: str, kept: Path, tags: Mapping[str, str]
) -> str:
    """Log a folder that `mlflow.transformers.save_model` wrote and make a version of it; returns its number. `kept` is
    what the pipeline run kept.
    """
    log_folder(connection, run_id, model, FLAVOR)
    version = _make_version(connection, run_id, FLAVOR, name, {**tags, FLAVOR: "transformers"})
    page = version_page(kept, LOAD_PIPELINE.format(name=name, version=version))
    connection.client.update_model_version(name, version, page)
    return version


def _make_version(connection: Connection, run_id: str, place: str, name: str, tags: Mapping[str, str]) -> str:
    """A model version of the run's artifact at `place`."""
    client = connection.client
    _ensure_registered_model(connection, name)
    source = f"{client.get_run(run_id).info.artifact_uri}/{place}"
    version = client.create_model_version(name, source=source, run_id=run_id, tags=dict(tags))
    return str(version.version)


def model_folders(root: Path, path: str) -> list[str]:
    """`path` and, if it is an adapter's with its base below `root`, that, by their place in the project."""
    config = root / path / ADAPTER_CONFIG
    if not config.is_file():
        return [path]
    base = str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"])
    place = os.path.normpath(Path(path) / base) if base.startswith(".") else ".."
    # a base from elsewhere stays there
    return [path] if place.startswith("..") else [path, Path(place).as_posix()]


def content_digest(folder: Path) -> str:
    """The digest that DVC gives the files of a folder as they are now: the MD5 of their sorted list, with .dir."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    listed = [{"md5": _md5(path), "relpath": name} for name, path in files]
    return f"{hashlib.md5(json.dumps(listed).encode(), usedforsecurity=False).hexdigest()}.dir"


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def log_quantised(connection: Connection, run_id: str, name: str, quantised: Quantised) -> None:
    """What quantising the run's model changes: a file of the run, tags of each model version."""
    with unless_deleted(connection, run_id):
        connection.client.log_dict(run_id, quantised.model_dump(mode="json"), FILE)
    for version in _versions(connection, name, quantised.model_digest):
        for file in quantised.files:
            gain = file.difference
            connection.client.set_model_version_tag(
                name,
                version.version,
                f"quantised.{file.kind}",
                f"{file.bytes} bytes; {file.flips} of {file.prompts} greedy replies are not "
                f"the model's; {file.judge} {gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})",
            )


def log_benchmarks(connection: Connection, run_id: str, name: str, benchmarked: Benchmarked) -> None:
    """How the run's model is served: metrics of the run by concurrency, which MLflow draws, a table of all loads, and
    a tag for each way to serve it on each model version.
    """
    log(connection, run_id, [m for benchmark in benchmarked.benchmarks for m in serving_metrics(benchmark)])
    rows = [row for benchmark in benchmarked.benchmarks for row in serving_rows(benchmark)]
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    table = {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}
    with unless_deleted(connection, run_id):
        connection.client.log_dict(run_id, table, SERVED_TABLE)
        shown = connection.client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
        tables = [entry for entry in json.loads(shown) if entry["path"] != SERVED_TABLE]
        tables.append({"path": SERVED_TABLE, "type": "table"})
        connection.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(tables))
    lines = {
        serving_name(benchmark): line
        for benchmark in benchmarked.benchmarks
        if (line := serving_line(benchmark)) is not None
    }
    for version in _versions(connection, name, benchmarked.model_digest):
        for serving, line in lines.items():
            connection.client.set_model_version_tag(name, version.version, f"served.{serving}", line)
        before = (version.description or "").partition(SERVED_TITLE)[0].rstrip()
        listed = "\n".join(f"- {serving}: {line}" for serving, line in lines.items())
        connection.client.update_model_version(name, version.version, f"{before}\n\n{SERVED_TITLE}\n\n{listed}\n")


def version_of(connection: Connection, name: str, digest: str, is_mlflow_model: bool = False) -> str | None:
    """The newest version of the registered model that has this content, None if there is none; with `is_mlflow_model`
    only one that `mlflow.transformers.load_model` loads.
    """
    versions = [
        version for version in _versions(connection, name, digest) if not is_mlflow_model or FLAVOR in version.tags
    ]
    return str(versions[0].version) if versions else None


def _versions(connection: Connection, name: str, digest: str) -> list[ModelVersion]:
    """Newest first."""
    return list(
        connection.client.search_model_versions(
            f"name = '{name}' and tags.`dvc.digest` = '{digest}'", order_by=["version_number DESC"]
        )
    )


def _ensure_registered_model(connection: Connection, name: str) -> None:
    try:
        connection.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
