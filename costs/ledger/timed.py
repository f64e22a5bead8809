"""What stages took on this machine: append-only, for the plans to come. `rlhf calibrate` writes it, and every run that
made a stage itself.

.rlhf/timed.jsonl   TimedRow   one row per phase of a stage

It lies outside of runs/, so that it outlives them. A row cut by a crash is skipped and counted.
"""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import jsonl
from config.jsonl import Rows
from config.records import TimedRow
from config.workspace.machine import TIMED_FILE
from costs.ledger.ledger import Ledger


def this_machine() -> str:
    """Processor and number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def read_timed(root: Path) -> Rows:
    """All rows of this machine, oldest first, and how many were skipped."""
    rows = jsonl.read(root / TIMED_FILE, TimedRow)
    machine = this_machine()
    return Rows([row for row in rows.rows if row.machine == machine], rows.skipped)


def skipped_note(skipped: int) -> str | None:
    """One line for the reader of a plan or a bill where rows were skipped, else None."""
    if not skipped:
        return None
    rows = "1 row" if skipped == 1 else f"{skipped} rows"
    return (
        f"{rows} of {TIMED_FILE} cut by a crash or not understood: plans do without them. Delete them from the file "
        "to lose this line."
    )


def remember(root: Path, ledger: Ledger, plan: Mapping[str, Any] | None) -> int:
    """Append the stages that the run of `ledger` made itself and that were planned, each once; returns how many rows
    that were. Which units a phase had is in the plan that the run kept.
    """
    remembered = {(row.run_id, row.stage) for row in jsonl.read(root / TIMED_FILE, TimedRow).rows}
    planned = {stage["stage"]: stage for stage in (plan or {}).get("stages", [])}
    rows = [
        TimedRow(
            time=time.time(),
            run_id=ledger.run_id,
            machine=this_machine(),
            hardware=planned[stage.stage]["hardware"],
            processes=stage.world_size,
            stage=stage.stage,
            parameters=planned[stage.stage]["parameters"],
            micro_batch=planned[stage.stage]["levers"].get("micro_batch", 1.0),
            phase=phase.phase,
            units=planned[stage.stage]["units"][phase.phase],
            seconds=phase.seconds,
            peak_bytes=phase.peak_bytes,
        )
        for stage in ledger.stages
        if stage.state == "done" and stage.stage in planned and (ledger.run_id, stage.stage) not in remembered
        for phase in stage.useful_phases
        if planned[stage.stage].get("units", {}).get(phase.phase)
    ]
    for row in rows:
        jsonl.append(root / TIMED_FILE, row)
    return len(rows)
