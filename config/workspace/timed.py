"""What stages took on this machine: append-only, for the plans to come. `rlhf calibrate` writes it, and every run that
made a stage itself.

.rlhf/timed.jsonl   TimedRow   one row per phase of a stage

It lies outside of runs/, so that it outlives them. A row cut by a crash is skipped and counted.
"""

import os
import platform
from pathlib import Path

from config import jsonl
from config.jsonl import Rows
from config.records import TimedRow

TIMED_FILE = Path(".rlhf/timed.jsonl")


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
        f"{rows} of {TIMED_FILE} cut by a crash or not understood: plans do without them. "
        "Delete them from the file to lose this line."
    )
