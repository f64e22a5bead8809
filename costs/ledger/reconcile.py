"""Plan and measurement per stage and phase: plan.json of a run against its ledger. Pure, except for reading plan.json.

error = planned / measured - 1 on seconds, so +0.1 is a plan a tenth too long. Measured is the work that made a stage's
outputs, done once, whichever run paid for it: waste is no error of the planner and stands apart. Planned dollars are
planned seconds at the price of the ledger, so that a new price is no error either.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costs.ledger.ledger import Ledger, PhaseCost, StageCost
from costs.tables.price import usd_of

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Comparison:
    """Planned and measured; None if missing."""

    planned_seconds: float | None
    measured_seconds: float | None
    planned_usd: float | None
    measured_usd: float | None
    planned_peak_bytes: float | None
    measured_peak_bytes: float | None

    @property
    def error(self) -> float | None:
        return _error(self.planned_seconds, self.measured_seconds)

    @property
    def error_peak_bytes(self) -> float | None:
        return _error(self.planned_peak_bytes, self.measured_peak_bytes)

    def as_dict(self) -> dict[str, float | None]:
        return {**asdict(self), "error": self.error, "error_peak_bytes": self.error_peak_bytes}


UNKNOWN = Comparison(None, None, None, None, None, None)


@dataclass(frozen=True)
class StageComparison:
    stage: str
    total: Comparison
    phases: Mapping[str, Comparison]
    hardware: str = ""
    """The device that the stage was planned for, which is its pool's; empty without a plan."""


@dataclass(frozen=True)
class Reconciled:
    """A run's plan beside its measurement."""

    stages: tuple[StageComparison, ...]
    total: Comparison
    """Over the stages that were both planned and measured."""
    hardware: str
    """The device that was planned for; empty without a plan."""

    def stage(self, name: str) -> StageComparison | None:
        return next((stage for stage in self.stages if stage.stage == name), None)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan that a run kept, None if there is none that can be read."""
    try:
        content = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("stages"), list) else None


def reconcile(plan: Mapping[str, Any] | None, ledger: Ledger) -> Reconciled:
    """Every stage of the ledger beside its plan; without a plan the planned side is empty."""
    planned = {stage["stage"]: stage for stage in (plan or {}).get("stages", [])}
    stages = tuple(_stage(stage, planned.get(stage.stage), stage.usd_per_device_hour) for stage in ledger.stages)
    both = [stage.total for stage in stages if stage.total.error is not None]
    total = Comparison(
        *(_sum(both, name) for name in ("planned_seconds", "measured_seconds", "planned_usd", "measured_usd")),
        *(_most(both, name) for name in ("planned_peak_bytes", "measured_peak_bytes")),
    )
    return Reconciled(stages, total, str((plan or {}).get("hardware", "")))


def _stage(stage: StageCost, planned: Mapping[str, Any] | None, price: float) -> StageComparison:
    # plans of earlier versions have no idle devices
    gpus = planned.get("rented", planned["gpus"]) if planned else 1
    plans = {phase["phase"]: phase for phase in planned["phases"]} if planned else {}
    measured = {phase.phase: phase for phase in stage.useful_phases}
    names = dict.fromkeys([*plans, *measured])
    phases = {name: _phase(plans.get(name), measured.get(name), gpus, price, bool(measured)) for name in names}
    total = Comparison(
        planned_seconds=planned["seconds"] if planned else None,
        measured_seconds=sum(phase.seconds for phase in stage.useful_phases) if measured else None,
        planned_usd=_usd(planned["phases"], planned["seconds"], gpus, price) if planned else None,
        measured_usd=sum(phase.usd for phase in stage.useful_phases) if measured else None,
        planned_peak_bytes=(planned["peak_bytes_per_gpu"] or None) if planned else None,
        measured_peak_bytes=max(phase.peak_bytes for phase in stage.useful_phases) if measured else None,
    )
    hardware = str(planned.get("hardware", "")) if planned else ""
    return StageComparison(stage.stage, total, phases, hardware)


def _phase(
    planned: Mapping[str, Any] | None, cost: PhaseCost | None, gpus: int, price: float, measured: bool
) -> Comparison:
    """`measured` says that the stage was: a phase without rows then took no time."""
    return Comparison(
        planned_seconds=planned["seconds"] if planned else None,
        measured_seconds=cost.seconds if cost else 0.0 if measured else None,
        planned_usd=_usd([planned], planned["seconds"], gpus, price) if planned else None,
        measured_usd=cost.usd if cost else 0.0 if measured else None,
        planned_peak_bytes=(planned.get("peak_bytes") or None) if planned else None,
        measured_peak_bytes=cost.peak_bytes if cost else None,
    )


def _usd(phases: Sequence[Mapping[str, Any]], seconds: float, gpus: int, price: float) -> float:
    """The planned time at the price of the ledger, and what is paid to others meanwhile: a judge's endpoint."""
    return usd_of(seconds * gpus, price) + sum(phase.get("paid_usd", 0.0) for phase in phases)


def _error(planned: float | None, measured: float | None) -> float | None:
    return planned / measured - 1 if planned is not None and measured else None


def _sum(parts: list[Comparison], name: str) -> float | None:
    return sum(getattr(part, name) for part in parts) if parts else None


def _most(parts: list[Comparison], name: str) -> float | None:
    return max((value for part in parts if (value := getattr(part, name)) is not None), default=None)


def as_dict(ledger: Ledger, reconciled: Reconciled) -> dict[str, Any]:
    """The ledger's JSON with plan, measurement and error beside each other, for the run, each stage and each phase."""
    content = ledger.as_dict()
    for stage in content["stages"]:
        comparison = reconciled.stage(stage["stage"])
        if comparison is None:
            continue
        stage |= comparison.total.as_dict()
        phases = {phase["phase"] for phase in stage["phases"]}
        nothing = {"seconds": 0.0, "tokens": 0, "sequences": 0, "usd": 0.0, "peak_bytes": 0}
        stage["phases"] = list(stage["phases"]) + [
            {"phase": name, **nothing} for name in comparison.phases if name not in phases
        ]
        for phase in stage["phases"]:
            phase |= comparison.phases.get(phase["phase"], UNKNOWN).as_dict()
        del stage["useful_phases"]
    return content | reconciled.total.as_dict() | {"planned_hardware": reconciled.hardware}
