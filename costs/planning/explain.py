"""Explains a plan: the work of each phase and its time in isolation, and memory at the peak."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from config.errors import CostError
from config.schema import Params
from costs.formulas.compute import Work
from costs.formulas.setting import Setting
from costs.formulas.time import (
    attention_seconds,
    launch_seconds,
    matmul_rate,
    paging_seconds,
    sent_seconds,
    unpacking_seconds,
)
from costs.planning.phases import phases
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.settings import settings
from costs.planning.target import Target


@dataclass(frozen=True)
class Resource:
    """One resource used by a phase."""

    name: str
    amount: float
    unit: str
    seconds: float
    """Seconds in isolation."""
    formula: str
    source: str


@dataclass(frozen=True)
class PhaseReason:
    """A phase and what it asks for."""

    stage: str
    phase: str
    seconds: float
    usd: float
    peak_bytes: float
    bound: str
    resources: tuple[Resource, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Explanation of a run, a stage or a phase."""

    of: str
    seconds: float
    usd: float
    peak_bytes: float
    phases: tuple[PhaseReason, ...]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    """role -> part -> bytes at the stage's peak; empty for a run."""

    def as_json(self) -> dict[str, Any]:
        """The object that `rlhf plan explain --json` prints."""
        return asdict(self)


def explain_params(params: Params, target: Target, stages: Sequence[str], name: str) -> Explanation:
    """Explain the plan of `name`: a stage, STAGE.PHASE, or empty for the run. Raises CostError for an unknown stage or
    phase.
    """
    stage, _, phase = name.partition(".")
    if stage and stage not in stages:
        raise CostError(f"plan explain {name}: {stage} is not a stage of this plan. Known: {', '.join(stages)}.")
    chosen = (stage,) if stage else tuple(stages)
    stage_settings = settings(params, target)
    planned = plan(params, target, chosen).stages
    reasons = [reason for stage in planned for reason in _reasons(stage, stage_settings.get(stage.stage), phase)]
    if phase and not reasons:
        phases = ", ".join(phase.phase for phase in planned[0].phases)
        raise CostError(f"plan explain {name}: {phase} is not a phase of {stage}. Known: {phases}.")
    return Explanation(
        name or "the run",
        sum(reason.seconds for reason in reasons),
        sum(reason.usd for reason in reasons),
        max(reason.peak_bytes for reason in reasons) if phase else max(stage.peak_bytes_per_gpu for stage in planned),
        tuple(reasons),
        {role: dict(parts) for role, parts in planned[0].memory.items()} if stage else {},
    )


def _reasons(planned: StagePlan, setting: Setting | None, phase: str) -> list[PhaseReason]:
    # the phases of a judge have no resources: they are not computed by the stage
    rows = {phase.name: resources(phase.work, setting) for phase in phases(setting)} if setting else {}
    return [
        PhaseReason(
            planned.stage,
            planned_phase.phase,
            planned_phase.seconds,
            planned_phase.usd,
            planned_phase.peak_bytes,
            planned_phase.bound,
            tuple(rows.get(planned_phase.phase, ())),
        )
        for planned_phase in planned.phases
        if phase in ("", planned_phase.phase)
    ]


def resources(work: Work, setting: Setting) -> list[Resource]:
    """Resources of a phase's `work` on one device, each with its time in isolation by the formulas."""
    bandwidth = setting.hardware.bandwidth_bytes_per_second * setting.efficiency.bandwidth
    rows: list[tuple[str, float, str, float, str, str]] = [
        ("matrix products", work.matmul_flops, "FLOP", work.matmul_flops / matmul_rate(setting),
         "2 x weights x tokens forward, twice that backward", "arXiv 2001.08361 section 2.1"),
        ("attention", work.attention_flops, "FLOP", attention_seconds(work, setting),
         "4 x width x tokens^2 a layer and sequence", "arXiv 2205.05198 appendix A"),
        ("reading weights", work.weight_bytes, "B", work.weight_bytes / bandwidth,
         "bytes of the weights x passes", "arXiv 2211.05102 section 2"),
        ("memory traffic", work.bytes_moved, "B", work.bytes_moved / bandwidth,
         "norms, activations, logits, cache", "costs/formulas/counts.py"),
        ("unpacking weights", work.dequantised_bytes, "B", unpacking_seconds(work, setting),
         "quantised and 16-bit bytes x passes", "costs/formulas/counts.py"),
        ("launching", work.operations, "operations", launch_seconds(work, setting),
         "operations a layer x layers x passes", "costs/tables/engines.py"),
        ("collectives", work.communicated_bytes, "B", sent_seconds(work, setting),
         "weights and gradients x (n - 1) / n", "arXiv 1910.02054 section 7"),
        ("host memory", work.paged_bytes, "B", paging_seconds(work, setting),
         "offloaded gradients, weights, states", "arXiv 2101.06840 section 4"),
    ]  # fmt: skip
    return [
        Resource(name, amount, unit, seconds, formula, source)
        for name, amount, unit, seconds, formula, source in rows
        if amount
    ]
