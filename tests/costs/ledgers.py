"""Stages and ledgers made by hand, for tests of what is done with them."""

from typing import Any

from costs.ledger.ledger import Ledger, StageCost


def stage_cost(stage: str = "sft", **changes: Any) -> StageCost:
    """A stage done by one attempt on one device, that took no time."""
    nothing: dict[str, Any] = {
        "cached": False,
        "state": "done",
        "message": "",
        "attempt": 1,
        "attempts": 1,
        "failed_attempts": 0,
        "device": "cpu",
        "world_size": 1,
        "usd_per_device_hour": 3.6,
        "seconds": 0.0,
        "device_seconds": 0.0,
        "rented": 1,
        "idle_usd": 0.0,
        "usd": 0.0,
        "waste_seconds": 0.0,
        "waste_usd": 0.0,
        "memory_retries": 0,
        "saved_seconds": 0.0,
        "saved_usd": 0.0,
        "peak_bytes": 0,
        "phases": (),
    }
    return StageCost(stage=stage, **(nothing | changes))


def build_ledger(*stages: StageCost, state: str = "completed", price: float = 3.6) -> Ledger:
    return Ledger("r", state, 0.0, 1.0, price, stages, 0)
