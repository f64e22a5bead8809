"""Reads everything that the report shows: ledger, metrics, curves, calibration, samples. What is missing is empty."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import jsonl
from config.dvc_stages import out_digest
from config.errors import CostError
from config.records import STAGES, MetricRow, PipelineRow, kept_folder
from config.schema import Params
from config.workspace.benchmarked import Benchmark, read_benchmarked
from config.workspace.kept import Outs, completed_stages, kept_file
from config.workspace.quantised import QuantisedFile, read_quantised
from config.workspace.rows import pipeline_rows
from config.workspace.served import NOTHING_SERVED, Served, served_of
from costs.ledger.attempts import Attempt, read_attempts
from costs.ledger.ledger import Ledger, read_ledger
from costs.ledger.reconcile import Reconciled, read_plan, reconcile
from costs.tables.price import usd_per_device_hour

Metrics = Mapping[str, Any]
Curves = Mapping[str, list[tuple[float, float]]]
"""Metric name -> (step, value) in the order of the steps."""

NO_RUN = "none"
"""Ledger.state of outputs without a record of how they were made, as after `dvc pull`."""
REPLACED = "of this run is not known: what is in place is of another run, and this one kept no copy."


@dataclass(frozen=True)
class Findings:
    params: Params
    ledger: Ledger
    reconciled: Reconciled
    """What was planned beside what was measured."""
    metrics: Mapping[str, Metrics]
    """metrics/<stage>.json per stage; empty for a stage that has none in this run."""
    curves: Mapping[str, Curves]
    calibration: list[tuple[float, float, int]]
    """(confidence, accuracy, count) of each bin."""
    samples: list[Mapping[str, Any]]
    plots: Mapping[str, list[Mapping[str, str]]]
    """Rows of plots/data_*.csv by file stem."""
    notes: list[str]
    """Notes for the reader of the report: unreadable files, and files of other runs."""
    reply_rates: Mapping[str, float] = field(default_factory=dict)
    """Reply tokens per second of each model while it answered the held-out prompts."""
    quantised: tuple[QuantisedFile, ...] = ()
    """Measurements of the run's export; empty without one."""
    benchmarks: tuple[Benchmark, ...] = ()
    """What rlhf bench measured of the run's model, per way of serving it."""
    teacher_benchmarks: tuple[Benchmark, ...] = ()
    """For a student: measurements of the aligned model, served by another run."""
    served: Served = NOTHING_SERVED
    """Rows of rlhf serve for this run's model."""

    def value(self, stage: str, name: str) -> float | None:
        """A metric if it is a finite number, else None."""
        return finite(self.metrics[stage].get(name))


def finite(value: Any) -> float | None:
    """`value` as a float if it is a finite number other than a boolean, else None."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def read_findings(root: Path, params: Params, run_id: str | None = None) -> Findings:
    """Read what there is below `root` about a run; without a run id, about the newest.

    Raises CostError if there is no such run, or neither a run nor metrics.
    """
    notes: list[str] = []
    ledger = _ledger(root, params, run_id)
    attempts = {stage: read_attempts(root / "runs" / stage)[0] for stage in STAGES}
    outputs = _Outputs(root, ledger, attempts)
    if ledger.skipped_rows:
        notes.append(
            f"{ledger.skipped_rows} rows below runs/ were cut off by a crash or are invalid: they "
            "are missing from the sums."
        )
    metrics = {stage: _read_json(outputs.find(stage, f"metrics/{stage}.json"), notes) for stage in STAGES}
    calibration = _calibration(outputs.find("reward", "plots/reward_calibration.csv"), notes)
    samples = _read_samples(outputs.find("evaluate", "evaluation/samples.jsonl"), notes)
    plots = {f"data_{name}": outputs.find("data", f"plots/data_{name}.csv") for name in ("baselines", "lengths")}
    notes += [f"{paths[0]} {REPLACED}" for paths in outputs.unknown.values()]
    return Findings(
        params=params,
        ledger=ledger,
        reconciled=reconcile(read_plan(kept_folder(root, ledger.run_id)), ledger),
        metrics=metrics,
        curves={stage: _curves(root / "runs" / stage, ledger, stage, attempts[stage], notes) for stage in STAGES},
        calibration=calibration,
        samples=samples,
        reply_rates=_reply_rates(metrics["evaluate"], attempts["evaluate"]),
        plots={name: _read_csv(path, notes) for name, path in plots.items() if path},
        quantised=kept.files if (kept := read_quantised(root, ledger.run_id)) else (),
        benchmarks=_benchmarks(root, ledger.run_id, params.final_stage),
        teacher_benchmarks=_teacher_benchmarks(root, params, ledger.run_id),
        served=served_of(root, ledger.run_id),
        notes=notes,
    )


def _benchmarks(root: Path, run_id: str, stage: str) -> tuple[Benchmark, ...]:
    """The newest measurement of the model of a stage per way of serving it, whichever run served it."""
    lock = kept_folder(root, run_id) / "dvc.lock"
    digest = out_digest(lock, stage, f"models/{stage}")
    newest: dict[tuple[str, str, int], Benchmark] = {}
    for path in (root / "runs" / "pipeline").glob("*/benchmarked.json") if digest else ():
        kept = read_benchmarked(root, path.parent.name)
        for benchmark in kept.benchmarks if kept and kept.model_digest == digest else ():
            before = newest.get(benchmark.variant)
            if before is None or before.time < benchmark.time:
                newest[benchmark.variant] = benchmark
    return tuple(newest[variant] for variant in sorted(newest))


def _teacher_benchmarks(root: Path, params: Params, run_id: str) -> tuple[Benchmark, ...]:
    is_student = params.final_stage == "distill"
    return _benchmarks(root, run_id, params.align.method) if is_student else ()


def _reply_rates(metrics: Metrics, attempts: Sequence[Attempt]) -> dict[str, float]:
    """From the newest rows of the phase `generate`, whose step is the number of the model."""
    seconds = {row.step: row.seconds for attempt in attempts for row in attempt.usage if row.phase == "generate"}
    replies = finite(metrics.get("prompts")) or 0.0
    lengths = {name: finite(metrics.get(f"length_{name}")) for name in ("base", "sft", "aligned", "student")}
    return {
        name: replies * length / seconds[step]
        for step, (name, length) in enumerate(lengths.items(), start=1)
        if length is not None and seconds.get(step)
    }


def _ledger(root: Path, params: Params, run_id: str | None) -> Ledger:
    try:
        return read_ledger(root, params, run_id)
    except CostError:
        if run_id is not None or not any((root / "metrics").glob("*.json")):
            raise
        return Ledger(NO_RUN, NO_RUN, None, None, usd_per_device_hour(params), (), 0)


class _Outputs:
    """Where the results of a run are: its kept copies, or the current outputs if they are its own."""

    def __init__(self, root: Path, ledger: Ledger, attempts: Mapping[str, list[Attempt]]) -> None:
        self._root, self._ledger, self._attempts = root, ledger, attempts
        self._pipeline = pipeline_rows(root)
        self._completed: Mapping[str, Outs] = completed_stages(root, ledger.run_id)
        self.unknown: dict[str, list[str]] = {}
        """Completed stage -> files that no longer exist as the run left them."""

    def find(self, stage: str, path: str) -> Path | None:
        """The run's file at `path`, an output of `stage`; None if the run has none or it is not known."""
        if self._ledger.state == NO_RUN:
            return self._root / path
        digest = self._completed.get(stage, {}).get(path)
        file = kept_file(self._root, self._ledger.run_id, path, digest) if stage in self._completed else None
        if file is None and digest is None and self._is_in_place(stage):
            file = self._root / path
        if file is None and stage in self._completed and (digest is not None or path.startswith("metrics/")):
            self.unknown.setdefault(stage, []).append(path)
        return file

    def _is_in_place(self, stage: str) -> bool:
        """Whether the attempt that made this run's outputs is the one that made the current ones."""
        entry = self._ledger.stage(stage)
        if entry is None or entry.state not in ("done", "cached") or entry.attempt is None:
            return False
        return entry.attempt == _attempt_with_outputs(stage, self._pipeline, self._attempts[stage])


def _attempt_with_outputs(stage: str, pipeline: list[PipelineRow], attempts: list[Attempt]) -> int | None:
    """The attempt that made the current outputs: the one that the last pipeline run used, or a later one that was
    started by hand.
    """
    used = next((row for row in reversed(pipeline) if row.event == "stage" and row.stage == stage), None)
    maker = next((attempt for attempt in reversed(attempts) if attempt.done), None)
    if maker is not None and (used is None or maker.begin > used.time):
        return maker.number
    return used.attempt if used is not None else None


def _curves(folder: Path, ledger: Ledger, stage: str, attempts: list[Attempt], notes: list[str]) -> Curves:
    """The learning curves that led to the stage's outputs. Steps that were repeated are those of the later attempt.

    Empty for outputs whose attempt is not known.
    """
    entry = ledger.stage(stage)
    if entry is None:
        return {}
    numbers = (attempt.number for attempt in attempts if attempt.run_id == ledger.run_id or ledger.state == "manual")
    last = entry.attempt if entry.attempt is not None else max(numbers, default=0)
    rows = jsonl.read(folder / "metrics.jsonl", MetricRow).rows
    curves: dict[str, list[tuple[float, float]]] = {}
    broken = []
    for step, values in sorted(_values_by_step(attempts, last, rows).items()):
        for name, value in values.items():
            if math.isfinite(value):
                curves.setdefault(name, []).append((float(step), value))
            else:
                broken.append((step, name, value))
    if broken:
        step, name, value = broken[0]
        others = f", and {len(broken) - 1} values more are no numbers" if len(broken) > 1 else ""
        notes.append(f"Stage {stage} logged {name}={value} at step {step}{others}: the curves leave them out.")
    return curves


def _values_by_step(attempts: list[Attempt], last: int, rows: list[MetricRow]) -> dict[int, dict[str, float]]:
    """Step -> values that the attempts up to number `last` logged."""
    by_step: dict[int, dict[str, float]] = {}
    for attempt in attempts:
        if attempt.number > last:
            break
        by_step = {step: values for step, values in by_step.items() if step <= attempt.resumed_step}
        for row in rows:
            if (row.attempt, row.run_id) == (attempt.number, attempt.run_id):
                by_step[row.step] = {**by_step.get(row.step, {}), **row.values}
    return by_step


def _read_json(path: Path | None, notes: list[str]) -> Metrics:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"metrics/{path.name} cannot be read ({error}): its figures are missing here.")
        return {}
    return content if isinstance(content, dict) else {}


def _read_csv(path: Path, notes: list[str]) -> list[Mapping[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        notes.append(f"plots/{path.name} cannot be read ({error}): its picture is missing here.")
        return []


def _calibration(path: Path | None, notes: list[str]) -> list[tuple[float, float, int]]:
    if path is None:
        return []
    try:
        bins = [
            (float(row["confidence"]), float(row["accuracy"]), int(float(row["count"])))
            for row in _read_csv(path, notes)
        ]
    except (KeyError, TypeError, ValueError) as error:
        notes.append(
            f"plots/{path.name} has no usable confidence, accuracy and count ({error!r}): its picture is missing here."
        )
        return []
    return [row for row in bins if row[2] > 0 and math.isfinite(row[0]) and math.isfinite(row[1])]


def _read_samples(path: Path | None, notes: list[str]) -> list[Mapping[str, Any]]:
    if path is None:
        return []
    try:
        return [row for row in jsonl.plain(path) if isinstance(row, dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"evaluation/{path.name} cannot be read ({error}): sample replies are missing here.")
        return []
