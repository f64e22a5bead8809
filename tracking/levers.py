"""A comparison of levers in MLflow: a parent run with a child run per variant."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Metric

from config.schema import Params
from config.workspace.levers import Levers, VariantResult
from tracking.client import Connection, connect, ensure_run, log, named_faults, unless_deleted
from tracking.labels import KIND_TAG
from tracking.rows import metric_name

FIGURES = (
    "planned_seconds", "measured_seconds", "planned_usd", "measured_usd", "planned_total_usd",
    "measured_total_usd", "planned_peak_bytes", "measured_peak_bytes", "planned_flops",
    "measured_flops", "waste_usd", "quality", "quality_low", "quality_high", "difference",
    "difference_low", "difference_high", "kl", "usd_at_target",
)  # fmt: skip
STATUS = {"done": "FINISHED", "not here": "KILLED"}


def log_levers(root: Path, params: Params, found: Levers, files: Sequence[Path]) -> str:
    """Log a comparison, or log it again after an extension; returns the id of the parent run.

    Raises EnvironmentFault if MLflow does not take it.
    """
    now = time.time()
    workspace = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    key = f"{workspace}/levers/{found.study}"
    with named_faults(params.tracking.uri):
        connection = connect(root, params.tracking)
        name = f"levers of {found.method}"
        parent = ensure_run(connection, key, name, now, {KIND_TAG: "levers"})
        summary = {
            "levers/pairs_ranked_right": found.pairs_ranked_right,
            "levers/regret": found.regret,
            "levers/usd": found.total_usd,
        }
        log(
            connection, parent, metrics=_metrics(summary, now),
            tags={"rlhf.best": str(found.best), "rlhf.chosen": str(found.chosen)},
        )  # fmt: skip
        with unless_deleted(connection, parent):
            for file in files:
                if file.exists():
                    connection.client.log_artifact(parent, str(file))
        for variant in found.variants:
            tags = {"mlflow.parentRunId": parent, KIND_TAG: "variant"}
            child = ensure_run(connection, f"{key}/{variant.name}", variant.name, now, tags)
            changes = [(name, str(value)) for name, value in variant.changes.items()]
            log(
                connection, child, metrics=_metrics(_figures(variant), now), params=changes,
                tags={"rlhf.state": variant.state, "rlhf.same_quality": str(variant.same_quality)}
                | ({"rlhf.message": variant.reason} if variant.reason else {}),
            )  # fmt: skip
            status = STATUS.get(variant.state, "FAILED")
            _end(connection, child, status, variant.measured_seconds or 0.0)
        seconds = sum(variant.measured_seconds or 0.0 for variant in found.variants)
        _end(connection, parent, "FINISHED", seconds)
    return parent


def _end(connection: Connection, run: str, status: str, seconds: float) -> None:
    """End time `seconds` after the start, on every log: MLflow shows it as the duration."""
    with unless_deleted(connection, run):
        began = connection.client.get_run(run).info.start_time
        connection.client.set_terminated(run, status, end_time=began + round(1000 * seconds))


def _figures(variant: VariantResult) -> dict[str, float | None]:
    return {f"levers/{name}": getattr(variant, name) for name in FIGURES}


def _metrics(values: dict[str, float | None], now: float) -> list[Metric]:
    return [
        Metric(metric_name(*name.split("/")), float(value), round(now * 1000), 0)
        for name, value in values.items()
        if value is not None
    ]
