"""Everything the report shows, read once: ledger, metrics, curves, calibration, samples. What is
missing is empty.
"""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import jsonl
from config.errors import CostError
from config.records import STAGES, MetricRow, PipelineRow, kept_folder
from config.schema import Params
from costs.ledger.attempts import Attempt, read_attempts
from costs.ledger.ledger import Ledger, ledger
from costs.ledger.reconcile import Reconciled, read_plan, reconcile
from costs.tables.price import usd_per_device_hour

Metrics = Mapping[str, Any]
Curves = Mapping[str, list[tuple[float, float]]]
"""Metric name -> (step, value) in the order of the steps."""

NO_RUN = "none"
"""Ledger.state of outputs without any record of how they were made, as after `dvc pull`."""


@dataclass(frozen=True)
class Findings:
    params: Params
    ledger: Ledger
    reconciled: Reconciled
    """What was planned beside what was measured."""
    metrics: Mapping[str, Metrics]
    """Per stage, metrics/<stage>.json; empty for a stage that has none in this run."""
    curves: Mapping[str, Curves]
    calibration: list[tuple[float, float, int]]
    """(confidence, accuracy, count) of each bin."""
    samples: list[Mapping[str, Any]]
    plots: Mapping[str, list[Mapping[str, str]]]
    """Rows of plots/data_*.csv by file stem."""
    notes: list[str]
    """What could not be read or is not of this run, for the reader of the report."""

    def value(self, stage: str, name: str) -> float | None:
        """A metric that is a finite number, else None."""
        return finite(self.metrics[stage].get(name))


def finite(value: Any) -> float | None:
    """`value` as a float if it is a finite number (a boolean is none), else None."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def read_findings(root: Path, params: Params, run_id: str | None = None) -> Findings:
    """What is known below `root` about a run; without a run id, about the newest.

    Raises CostError if there is no such run, or neither a run nor metrics.
    """
    notes: list[str] = []
    book = _ledger(root, params, run_id)
    attempts = {stage: read_attempts(root / "runs" / stage)[0] for stage in STAGES}
    pipeline = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    places = {
        stage: _place(stage, root, book, _attempt_on_disk(stage, pipeline, attempts[stage]), notes)
        for stage in STAGES
    }
    metrics = {
        stage: _read_json(place / "metrics" / f"{stage}.json", notes) if place else {}
        for stage, place in places.items()
    }
    current = {stage: place == root for stage, place in places.items()}
    if book.skipped_rows:
        notes.append(
            f"{book.skipped_rows} rows below runs/ were cut by a crash or make no sense: they are "
            "missing from the sums."
        )
    return Findings(
        params=params,
        ledger=book,
        reconciled=reconcile(read_plan(kept_folder(root, book.run_id)), book),
        metrics=metrics,
        curves={
            stage: _curves(root / "runs" / stage, book, stage, attempts[stage], notes)
            for stage in STAGES
        },
        calibration=_calibration(root / "plots" / "reward_calibration.csv", notes)
        if current["reward"]
        else [],
        samples=_read_samples(samples / "evaluation" / "samples.jsonl", notes)
        if (samples := places["evaluate"])
        else [],
        plots={
            path.stem: _read_csv(path, notes)
            for path in sorted((root / "plots").glob("data_*.csv"))
        }
        if current["data"]
        else {},
        notes=notes,
    )


def _ledger(root: Path, params: Params, run_id: str | None) -> Ledger:
    try:
        return ledger(root, params, run_id)
    except CostError:
        if run_id is not None or not any((root / "metrics").glob("*.json")):
            raise
        return Ledger(NO_RUN, NO_RUN, None, None, usd_per_device_hour(params), (), 0)


def _place(
    stage: str, root: Path, book: Ledger, on_disk: int | None, notes: list[str]
) -> Path | None:
    """The folder that holds the stage's results in this run; None if it has none.

    The outputs of attempt `on_disk` may be of an earlier run, if this one did not come so far, or
    of a later one: then only the copies that the run kept are its own.
    """
    if book.state == NO_RUN:
        return root
    entry = book.stage(stage)
    if entry is None or entry.state not in ("done", "cached"):
        return None
    if entry.attempt is None or on_disk is None or entry.attempt == on_disk:
        return root
    copies = kept_folder(root, book.run_id)
    since = (
        f"Stage {stage} has been brought to attempt {on_disk} since, this run used attempt "
        f"{entry.attempt}"
    )
    if not (copies / "metrics" / f"{stage}.json").exists():
        notes.append(f"{since}: its results are not shown.")
        return None
    notes.append(
        f"{since}: of its results only the metrics and samples that the run kept are shown."
    )
    return copies


def _attempt_on_disk(
    stage: str, pipeline: list[PipelineRow], attempts: list[Attempt]
) -> int | None:
    """The attempt whose outputs are in place now: what the last pipeline run used, or what was made
    by hand after it.
    """
    used = next(
        (row for row in reversed(pipeline) if row.event == "stage" and row.stage == stage), None
    )
    made = next((attempt for attempt in reversed(attempts) if attempt.done), None)
    if made is not None and (used is None or made.begin > used.time):
        return made.number
    return used.attempt if used is not None else None


def _curves(
    folder: Path, book: Ledger, stage: str, attempts: list[Attempt], notes: list[str]
) -> Curves:
    """The learning curves that led to the stage's outputs: steps that a later attempt did again are
    its own.
    """
    entry = book.stage(stage)
    if entry is None:
        return {}
    rows = jsonl.read(folder / "metrics.jsonl", MetricRow).rows
    by_step: dict[int, dict[str, float]] = {}
    for attempt in attempts:
        if entry.attempt is not None and attempt.number > entry.attempt:
            break
        by_step = {step: values for step, values in by_step.items() if step <= attempt.resumed_step}
        for row in rows:
            if (row.attempt, row.run_id) == (attempt.number, attempt.run_id):
                by_step[row.step] = {**by_step.get(row.step, {}), **row.values}
    curves: dict[str, list[tuple[float, float]]] = {}
    for step, values in sorted(by_step.items()):
        for name, value in values.items():
            if math.isfinite(value):
                curves.setdefault(name, []).append((float(step), value))
    broken = [
        (step, name, value)
        for step, values in sorted(by_step.items())
        for name, value in values.items()
        if not math.isfinite(value)
    ]
    if broken:
        step, name, value = broken[0]
        others = f", and {len(broken) - 1} values more are no numbers" if len(broken) > 1 else ""
        notes.append(
            f"Stage {stage} logged {name}={value} at step {step}{others}: the curves leave them "
            "out."
        )
    return curves


def _read_json(path: Path, notes: list[str]) -> Metrics:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(
            f"metrics/{path.name} can not be read ({error}): its figures are missing here."
        )
        return {}
    return content if isinstance(content, dict) else {}


def _read_csv(path: Path, notes: list[str]) -> list[Mapping[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        notes.append(f"plots/{path.name} can not be read ({error}): its picture is missing here.")
        return []


def _calibration(path: Path, notes: list[str]) -> list[tuple[float, float, int]]:
    try:
        bins = [
            (float(row["confidence"]), float(row["accuracy"]), int(float(row["count"])))
            for row in _read_csv(path, notes)
        ]
    except (KeyError, TypeError, ValueError) as error:
        notes.append(
            f"plots/{path.name} has no usable confidence, accuracy and count ({error!r}): its "
            "picture is missing here."
        )
        return []
    return [row for row in bins if row[2] > 0 and math.isfinite(row[0]) and math.isfinite(row[1])]


def _read_samples(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    try:
        return [row for row in jsonl.plain(path) if isinstance(row, dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(
            f"evaluation/{path.name} can not be read ({error}): sample replies are missing here."
        )
        return []
