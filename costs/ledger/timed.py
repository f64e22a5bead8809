"""Remembers what the stages of a run took (config/workspace/timed.py)."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import jsonl
from config.records import TimedRow
from config.workspace.timed import TIMED_FILE, this_machine
from costs.ledger.ledger import Ledger


def remember(root: Path, ledger: Ledger, plan: Mapping[str, Any] | None) -> int:
    """Append the stages that the run of `ledger` made itself and that were planned, each once; returns how many rows
    that were. Which units a phase had is in the plan that the run kept.
    """
    remembered = {(row.run_id, row.stage) for row in jsonl.read(root / TIMED_FILE, TimedRow).rows}
    planned = {stage["stage"]: stage for stage in (plan or {}).get("stages", [])}
    now, machine = time.time(), this_machine()
    rows = [
        TimedRow(
            time=now,
            run_id=ledger.run_id,
            machine=machine,
            hardware=planned[stage.stage]["hardware"],
            stage=stage.stage,
            held=planned[stage.stage]["held"],
            micro_batch=planned[stage.stage]["levers"].get("micro_batch", 1.0),
            phase=phase.phase,
            units=planned[stage.stage]["units"][phase.phase],
            seconds=phase.seconds,
            peak_bytes=phase.peak_bytes,
            taught_nothing=stage.taught_nothing_usd / stage.usd if stage.usd else 0.0,
        )
        for stage in ledger.stages
        if stage.state == "done" and stage.stage in planned and (ledger.run_id, stage.stage) not in remembered
        for phase in stage.useful_phases
        if planned[stage.stage].get("units", {}).get(phase.phase) and phase.seconds > 0
    ]
    for row in rows:
        jsonl.append(root / TIMED_FILE, row)
    return len(rows)
