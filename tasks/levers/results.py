"""Results of a comparison: the figures of each variant, and the frontier."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from config import jsonl
from config.methods.registry import METHODS, SAMPLING_METHODS
from config.records import MetricRow
from config.schema import Params
from config.workspace.levers import FrontierPoint, VariantResult
from costs.levers.judgement import Costed, Scored, first_update_at, margin
from costs.levers.variants import BASELINE, Variant
from costs.planning.plans import Plan, StagePlan
from tasks.levers.processes import Made, Spent


@dataclass
class Trained:
    """A variant with one seed."""

    variant: Variant
    seed: int
    chain: dict[str, Params]
    """The params of each stage."""
    folders: dict[str, Path] = field(default_factory=dict)
    plans: dict[str, StagePlan] = field(default_factory=dict)
    costs: dict[str, Spent] = field(default_factory=dict)
    state: Made = field(default_factory=lambda: Made("done"))
    answers: Path | None = None
    """The scored replies of its model."""

    def content(self) -> dict[str, Any]:
        """What `answers` holds, empty without."""
        if self.answers is None:
            return {}
        return dict(json.loads(self.answers.read_text(encoding="utf-8")))

    def curve(self) -> list[Scored]:
        """Scores of the responses of each update; empty for methods that do not sample."""
        return [Scored(**point) for point in self.content().get("curve", [])]


class Judged(NamedTuple):
    """Quality and difference to the baseline of each variant, by name, with intervals."""

    judge: Literal["gold", "win_rate"]
    confidence: float
    variants: Mapping[str, dict[str, float]]

    @property
    def margin(self) -> float:
        return margin(self.judge)

    @property
    def target(self) -> float:
        """The variant whose quality counts as the baseline's."""
        return self.variants[BASELINE]["quality"] - self.margin


def variant_result(
    variant: Variant, own: Sequence[Trained], judged: Judged, plan: Plan, sweep_usd: float
) -> VariantResult:
    """One variant over its seeds. `plan` is for where it cannot run here."""
    hardware = plan.stages[0].hardware
    found: dict[str, Any] = {
        "name": variant.name,
        "changes": dict(variant.changes),
        "seeds": len(own),
        "hardware": hardware,
        "sweep_usd": sweep_usd,
    }
    if variant.missing:
        planned = _planned(variant, {stage.stage: stage for stage in plan.stages})
        return VariantResult(**found, **planned, state="not here", reason=variant.missing)
    found |= _means([_figures(each) for each in own])
    scores = judged.variants.get(variant.name)
    failed = next((each.state for each in own if each.state.state != "done"), None)
    if failed is not None or scores is None:
        state = failed or Made("failed", "it has no answers")
        return VariantResult(**found, state=state.state, reason=state.reason)
    same = scores["difference_low"] >= -judged.margin
    at_target = _at_target(own, judged)
    return VariantResult(**found, **scores, **at_target, state="done", same_quality=same)


def costed_of(found: VariantResult) -> Costed | None:
    """For the judgement of the planner; None for what was not trained to its end."""
    if found.state != "done" or not found.measured_usd or found.quality is None:
        return None
    planned = found.planned_usd or 0.0
    return Costed(found.name, planned, found.measured_usd, found.same_quality, found.quality)


def frontier(trained: Sequence[Trained], judged: Judged) -> dict[str, list[FrontierPoint]]:
    """Quality against KL of each method: along training where it samples, and where it ends; of
    best-of-n by n. Without a gold score only the ends: the judge of training is another.
    """
    found: dict[str, list[FrontierPoint]] = {}
    for each in trained:
        variant, gold = each.variant, judged.judge == "gold"
        if each.answers is None:
            continue
        if variant.best_of and gold:
            found["best-of-n"] = [
                FrontierPoint(kl=one["kl"], quality=sum(one["golds"]) / len(one["golds"]))
                for one in each.content()["best_of"]
            ]
        elif variant.name in (BASELINE, *METHODS):
            end = judged.variants[variant.name]
            point = FrontierPoint(kl=end["kl"], quality=end["quality"])
            found[variant.params.align.method] = [*(_along(each) if gold else []), point]
    return found


def _along(each: Trained) -> list[FrontierPoint]:
    """KL and quality of the responses of each update."""
    method = each.variant.params.align.method
    if method not in SAMPLING_METHODS:
        return []
    metrics = each.folders[method] / "runs" / method / "metrics.jsonl"
    rows: list[MetricRow] = jsonl.read(metrics, MetricRow).rows
    kls = {row.step: row.values["kl"] for row in rows if "kl" in row.values}
    return [
        FrontierPoint(kl=kls[point.update], quality=point.mean)
        for point in each.curve()
        if point.update in kls
    ]


def _planned(variant: Variant, plans: Mapping[str, StagePlan]) -> dict[str, float]:
    own = [plans[stage] for stage in variant.own_stages if stage in plans]
    if not own:
        return {}
    return {
        "planned_seconds": sum(stage.seconds for stage in own),
        "planned_usd": sum(stage.usd.expected for stage in own),
        "planned_total_usd": sum(stage.usd.expected for stage in plans.values()),
        "planned_peak_bytes": max(stage.peak_bytes_per_gpu for stage in own),
        "planned_flops": sum(phase.flops for stage in own for phase in stage.phases),
    }


def _figures(each: Trained) -> dict[str, float]:
    """Planned and measured figures of one seed."""
    found = _planned(each.variant, each.plans)
    own = [each.costs[stage] for stage in each.variant.own_stages if stage in each.costs]
    if not own:
        return found
    found |= {
        "measured_seconds": sum(cost.seconds for cost in own),
        "measured_usd": sum(cost.usd for cost in own),
        "measured_total_usd": sum(cost.usd for cost in each.costs.values()),
        "measured_peak_bytes": float(max(cost.peak_bytes for cost in own)),
        "waste_usd": sum(cost.waste_usd for cost in own),
    }
    planned_tokens = sum(each.plans[stage].tokens for stage in each.variant.own_stages)
    if planned_tokens and "planned_flops" in found:
        share = sum(cost.tokens for cost in own) / planned_tokens
        found["measured_flops"] = found["planned_flops"] * share
    return found


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, over the seeds that have it."""
    by_name: dict[str, list[float]] = {}
    for each in found:
        for name, value in each.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _at_target(own: Sequence[Trained], judged: Judged) -> dict[str, Any]:
    """When the method's own responses first reached the target, and what it had cost by then; means
    over seeds, nothing if one of them never did.
    """
    reached = []
    for each in own:
        update = first_update_at(each.curve(), judged.target, judged.confidence)
        if update is None:
            return {}
        by_step = each.costs[each.variant.params.align.method].usd_by_step
        cost = max((usd for step, usd in by_step.items() if step <= update), default=0.0)
        reached.append((update, cost))
    return {
        "updates_at_target": round(sum(update for update, _ in reached) / len(reached)),
        "usd_at_target": sum(cost for _, cost in reached) / len(reached),
    }
