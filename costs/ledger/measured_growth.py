"""What the runs of this checkout measured of a stage, by the size of their model."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from config.errors import RlhfError
from config.workspace.kept import kept_params
from costs.ledger.history import read_history
from costs.planning.settings import base_shape
from costs.planning.sweep import exponent

NEWEST = 20
"""Runs shown at most."""


class Measured(NamedTuple):
    """A stage as one run made it."""

    run_id: str
    parameters: float
    planned_seconds: float
    measured_seconds: float
    measured_peak_bytes: float


def measured(root: Path, stage: str) -> list[Measured]:
    """The newest runs that made the stage themselves and were planned; those whose params are not
    kept or of an older schema are left out.
    """
    found = []
    for row in read_history(root).rows:
        if row.stage != stage or row.phase:
            continue
        try:
            parameters = base_shape(kept_params(root, row.run_id), root).parameters
        except RlhfError:
            continue
        found.append(
            Measured(
                row.run_id,
                parameters,
                row.planned_seconds,
                row.measured_seconds,
                row.measured_peak_bytes,
            )
        )
    return found[-NEWEST:]


def measured_exponent(runs: Sequence[Measured]) -> float | None:
    """Slope of log(seconds) over log(parameters), None where all models are of one size. Everything
    else that differs is in it too.
    """
    if len({run.parameters for run in runs}) < 2:
        return None
    return exponent([run.parameters for run in runs], [run.measured_seconds for run in runs])
