"""Learning curves of a stage as a CSV for `dvc plots`, from the metric rows of the attempts that led to its output."""

from collections.abc import Sequence

from config import jsonl
from config.records import AttemptRow, MetricRow
from training.process.artifacts import write_csv
from training.process.stage import Stage


def write_curves(stage: Stage, target: str, names: Sequence[str]) -> list[dict[str, float]]:
    """One line per step whose row has the first of `names`: a Trainer's closing row has not.

    Where an attempt was resumed, steps it repeated are taken from the later attempt. Returns the values of each step,
    in order.
    """
    folder = stage.root / "runs" / stage.name
    attempts = {
        row.attempt
        for row in jsonl.read(folder / "attempts.jsonl", AttemptRow).rows
        if row.fingerprint == stage.fingerprint
    }
    by_step: dict[int, dict[str, float]] = {}
    for row in jsonl.read(folder / "metrics.jsonl", MetricRow).rows:
        if row.attempt in attempts | {stage.attempt} and names[0] in row.values:
            by_step[row.step] = row.values
    rows = [[step, *(values.get(name, "") for name in names)] for step, values in sorted(by_step.items())]
    write_csv(stage.root / target, ["step", *names], rows)
    return [values for _, values in sorted(by_step.items())]
