"""Plans and measurements of this machine's runs: append-only, for the planner's own error.

.rlhf/planned-measured.jsonl   PlannedRow   one row per stage that a run made, and one per phase of
                               it

It lies outside of runs/, so that it outlives them. A row cut by a crash is skipped and counted.
"""

import os
import platform
import time
from pathlib import Path

from config import jsonl
from config.jsonl import Rows
from config.records import PlannedRow
from costs.ledger.ledger import Ledger
from costs.ledger.reconcile import Comparison, Reconciled

HISTORY = Path(".rlhf/planned-measured.jsonl")


def this_machine() -> str:
    """Processor and number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def read_history(root: Path) -> Rows:
    """All rows of this machine, oldest first, and how many were skipped."""
    rows = jsonl.read(root / HISTORY, PlannedRow)
    machine = this_machine()
    return Rows([row for row in rows.rows if row.machine == machine], rows.skipped)


def skipped_note(skipped: int) -> str | None:
    """One line for the reader of a plan or a bill where rows were skipped, else None."""
    if not skipped:
        return None
    rows = "1 row" if skipped == 1 else f"{skipped} rows"
    return (
        f"{rows} of {HISTORY} cut by a crash or not understood: left out of the error of past "
        "plans. Delete them from the file to lose this line."
    )


def remember(root: Path, ledger: Ledger, reconciled: Reconciled) -> int:
    """Append the stages that the run of `ledger` made itself and that were planned, each once; returns how many rows
    that were.
    """
    remembered = {(row.run_id, row.stage) for row in jsonl.read(root / HISTORY, PlannedRow).rows}
    completed = [
        stage.stage
        for stage in ledger.stages
        if stage.state == "done" and (ledger.run_id, stage.stage) not in remembered
    ]
    rows = []
    for stage in (stage for stage in reconciled.stages if stage.stage in completed):
        for phase, comparison in [*stage.phases.items(), ("", stage.total)]:
            device = stage.hardware or reconciled.hardware
            row = _row(ledger.run_id, device, stage.stage, phase, comparison)
            rows += [row] if row else []
    for row in rows:
        jsonl.append(root / HISTORY, row)
    return len(rows)


def _row(run_id: str, hardware: str, stage: str, phase: str, comparison: Comparison) -> PlannedRow | None:
    """None for rows without a plan or without time."""
    if comparison.planned_seconds is None or not comparison.measured_seconds:
        return None
    return PlannedRow(
        time=time.time(),
        run_id=run_id,
        machine=this_machine(),
        hardware=hardware,
        stage=stage,
        phase=phase,
        planned_seconds=comparison.planned_seconds,
        measured_seconds=comparison.measured_seconds,
        planned_peak_bytes=comparison.planned_peak_bytes or 0.0,
        measured_peak_bytes=comparison.measured_peak_bytes or 0.0,
    )
