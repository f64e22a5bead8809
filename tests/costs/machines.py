"""A calibrated machine with round rates, and what the demo's stages took on it."""

from pathlib import Path
from typing import Any

from config.load import load
from config.records import TimedRow
from config.workspace.machine import Machine
from config.workspace.timed import this_machine
from costs.planning.machine import held
from costs.planning.settings import settings
from costs.planning.target import Target
from costs.tables.catalogue import hardware, own_price
from tests.conftest import ROOT

DEMO = load(ROOT / "recipes/demo.yaml")
TARGET = Target(hardware("cpu"), own_price(0.1, "a test", "2026-11-23"), root=Path("nowhere"))


def timed(stage: str, phase: str, **changes: Any) -> TimedRow:
    """A phase of the demo that took 10 s for 1,000 units."""
    content: dict[str, Any] = {
        "time": 1.0,
        "run_id": "",
        "machine": this_machine(),
        "hardware": "cpu-calibrated",
        "stage": stage,
        "held": held(settings(DEMO, TARGET)[stage]) if stage != "data" else "",
        "micro_batch": 32.0,
        "phase": phase,
        "units": 1000.0,
        "seconds": 10.0,
        "peak_bytes": 10.0 * 2**30,
    }
    return TimedRow.model_validate(content | changes)


def machine(**changes: Any) -> Machine:
    """Products at 100 GFLOP/s, streams at 10 GB/s."""
    content: dict[str, Any] = {
        "name": "cpu",
        "processor": "a test",
        "threads": 1,
        "memory_bytes": 8 * 2**30,
        "usable_bytes": 8 * 2**30,
        "torch": "2.13.0",
        "date": "2026-11-21",
        "seconds": 30.0,
        "flops_per_second": {"fp32": 1e11},
        "bytes_per_second": 1e10,
    }
    return Machine.model_validate(content | changes)
