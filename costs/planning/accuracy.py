"""Errors of past plans on this machine: an interval for new plans, and a correction if it has proved itself.

The ratio measured / planned of past runs is taken as log-normal. A correction is the geometric mean of the ratios. It
is used only if it lowers the mean error on runs that it was not fitted on: each run is predicted from the others, with
and without.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, log, sqrt

from config.records import PlannedRow
from costs.planning.plans import Band, Interval, Plan, PlanError, StagePlan

FEWEST_RUNS = 3
"""Fewest runs for a correction or an interval."""
NEWEST_RUNS = 20
"""Older runs were planned with other formulas."""
LEVEL = 0.8
"""Share of runs within the interval."""
T_90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341)
"""90% quantiles of Student's t for 1 to 15 degrees of freedom."""
T_90_BEYOND = 1.325
"""The same for 20; 1.28 in the limit."""


@dataclass(frozen=True)
class Spread:
    """Factors on a plan."""

    low: float
    expected: float
    """1 where no correction is used."""
    high: float
    runs: int
    error: float
    """Mean |log ratio| of the past runs as they were planned: near their mean relative error."""

    @property
    def corrected(self) -> bool:
        return self.expected != 1.0


def ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """measured / planned of (planned, measured) pairs, the newest NEWEST_RUNS; pairs that are not positive are
    ignored.
    """
    return [measured / planned for planned, measured in pairs if planned > 0 and measured > 0][-NEWEST_RUNS:]


def correction(ratios: Sequence[float]) -> float:
    """The factor to use on the next plan: the geometric mean, or 1 if that did not help runs it was not fitted on."""
    if len(ratios) < FEWEST_RUNS:
        return 1.0
    logs = [log(ratio) for ratio in ratios]
    total, n = fsum(logs), len(logs)
    without = fsum(abs(x) for x in logs)
    left_out = fsum(abs(x - (total - x) / (n - 1)) for x in logs)
    return exp(total / n) if left_out < without else 1.0


def spread(ratios: Sequence[float]) -> Spread | None:
    """The interval that holds LEVEL of the runs to come, None from fewer than FEWEST_RUNS.

    Around a fitted mean: s sqrt(1 + 1/n) t(n - 1). Around 1: the root mean square of the logs times t(n).
    Source: the prediction interval of a normal sample, Geisser 1993, Predictive Inference, section 2.2.
    """
    n = len(ratios)
    if n < FEWEST_RUNS:
        return None
    logs, factor = [log(ratio) for ratio in ratios], correction(ratios)
    middle = log(factor)
    free = n - 1 if factor != 1.0 else n
    deviation = sqrt(fsum((x - middle) ** 2 for x in logs) / free) * (sqrt(1 + 1 / n) if factor != 1.0 else 1.0)
    half = deviation * (T_90[free - 1] if free <= len(T_90) else T_90_BEYOND)
    return Spread(exp(middle - half), factor, exp(middle + half), n, fsum(map(abs, logs)) / n)


def with_errors(plan: Plan, past: Iterable[PlannedRow]) -> Plan:
    """`plan` with intervals from this machine's runs that were planned for the same device."""
    stages = [row for row in past if row.phase == ""]
    return replace(plan, stages=tuple(_with_error(stage, stages) for stage in plan.stages))


def _with_error(stage: StagePlan, past: Sequence[PlannedRow]) -> StagePlan:
    stage_rows = [row for row in past if row.stage == stage.stage and row.hardware == stage.hardware]
    seconds = spread(ratios((row.planned_seconds, row.measured_seconds) for row in stage_rows))
    memory = spread(ratios((row.planned_peak_bytes, row.measured_peak_bytes) for row in stage_rows))
    error = PlanError(_band(stage.seconds, seconds), _band(stage.peak_bytes_per_gpu, memory))
    return replace(
        stage,
        error=error,
        time_interval=_graded(stage.time_interval, error.seconds),
        memory_interval=_graded(stage.memory_interval, error.peak_bytes),
    )


def _graded(before: Interval, band: Band | None) -> Interval:
    """Grade A where this machine's own runs say it."""
    if band is None:
        return before
    return Interval("A", band.low, band.high, f"{band.runs} runs of this machine")


def _band(planned: float, errors: Spread | None) -> Band | None:
    if errors is None or not planned:
        return None
    return Band(
        planned * errors.low,
        planned * errors.expected,
        planned * errors.high,
        errors.runs,
        errors.error,
        errors.corrected,
    )
