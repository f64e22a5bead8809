"""A calibrated machine with round rates."""

from typing import Any

from config.workspace.machine import Machine, TimedStage


def stage(name: str, start_seconds: float = 2.5, **changes: Any) -> TimedStage:
    """A stage that took twice as long as its formulas say, and 10 MiB more."""
    content: dict[str, Any] = {
        "stage": name,
        "parameters": 529_200.0,
        "start_seconds": start_seconds,
        "paces": {"train": 2.0, "rollout": 2.0, "update": 2.0, "score": 2.0, "generate": 2.0},
        "bytes": {"train": 10.0 * 2**20, "update": 10.0 * 2**20, "score": 10.0 * 2**20},
    }
    return TimedStage.model_validate(content | changes)


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
        "stages": tuple(stage(name) for name in ("sft", "reward", "ppo", "evaluate")),
    }
    return Machine.model_validate(content | changes)
