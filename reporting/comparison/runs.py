"""Compares runs with the first of them: cost, quality, metrics, parameters and replies."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from config.compose import flat
from config.errors import UserError
from config.records import STAGES, kept_folder
from config.workspace.kept import Outs, completed_stages, kept_params
from config.workspace.study import MARGIN
from reporting.comparison.statistics import (
    CHEAPER,
    SAME,
    Costed,
    Estimate,
    Verdict,
    average,
    difference,
    exponent,
    paired,
    ranking,
    verdict,
)
from reporting.inputs import Findings, read_findings
from reporting.numbers import decimal, percent

ABSENT_PARAM = "(absent)"
NOT_GROWING = ("start", "save", "evaluate", "other")
"""Phases left out of a fit of growth: they are fixed, or judge the model."""


class Metric(NamedTuple):
    stage: str
    name: str
    title: str
    shown: Callable[[float | None], str]


METRICS = (
    Metric("sft", "eval_loss", "SFT held-out loss", decimal),
    Metric("reward", "accuracy", "Reward accuracy", percent),
    Metric("reward", "bayes_accuracy", "Possible accuracy", percent),
    Metric("reward", "ece", "Calibration error", decimal),
    Metric("evaluate", "gold_sft", "Gold, SFT", decimal),
    Metric("evaluate", "gold_aligned", "Gold, aligned", decimal),
    Metric("evaluate", "gold_student", "Gold, student", decimal),
    Metric("evaluate", "quality_kept", "Kept by the student", percent),
    Metric("evaluate", "right_item_rate", "Right item", percent),
    Metric("evaluate", "win_rate_gold", "Wins, by gold", percent),
    Metric("evaluate", "win_rate_judge", "Wins, by the judge", percent),
    Metric("evaluate", "win_rate_reward", "Wins, by reward", percent),
    Metric("evaluate", "reward_gain", "Reward gain", decimal),
    Metric("evaluate", "kl", "KL, nats per reply", decimal),
    Metric("evaluate", "length_aligned", "Reply tokens", decimal),
    Metric("evaluate", "eos_rate_aligned", "Replies that end", percent),
)


class Run(NamedTuple):
    """A run, with what its completed stages made."""

    findings: Findings
    outs: Mapping[str, Outs]

    @property
    def id(self) -> str:
        return self.findings.ledger.run_id

    @property
    def model(self) -> str:
        """The model that is judged: aligned or student."""
        return self.findings.params.tracking.model


@dataclass(frozen=True)
class Variant:
    """One or more runs that differ in nothing but their seed."""

    name: str
    runs: Mapping[int, Run]
    """Runs by seed; empty if none completed."""
    changes: Sequence[str] = ()
    reason: str = ""
    """Why none did."""


class VariantResult(BaseModel):
    """A variant beside the base; figures are means over its runs."""

    name: str
    changes: list[str]
    runs: list[str]
    verdict: Verdict
    reason: str
    planned_usd: float | None
    measured_usd: float | None
    """Cost of making the model, without the stages that all variants share."""
    taught_nothing_usd: float | None
    """The part of what its runs spent for replies that taught nothing."""
    seconds: float | None
    stages: dict[str, float]
    """Stage -> US dollars that making its outputs cost, the shared ones too."""
    quality: float | None
    difference: Estimate | None
    """Difference of its quality from the base's."""
    metrics: dict[str, Estimate]
    differences: dict[str, Estimate]
    """Difference of its metrics from the base's."""


class Growth(BaseModel):
    """Cost ~ size^exponent."""

    factor: str
    sizes: list[float]
    """One entry per run, as with the costs."""
    measured_usd: list[float]
    planned_usd: list[float]
    exponent: Estimate
    planned_exponent: float


class Comparison(BaseModel):
    """What `rlhf compare --json` and `rlhf study --json` print."""

    judge: str
    """gold, judge (win rate over the SFT model), or reward (the same by its reward model)."""
    margin: float
    variants: list[VariantResult]
    shared: list[str]
    """Stages whose outputs all variants have in common."""
    params: dict[str, list[Any]]
    """Key -> its value in each variant, where they differ."""
    pairs: int
    pairs_ranked_right: float | None
    chosen: str | None
    cheapest: str | None
    regret: float | None
    growth: list[Growth]
    samples: list[dict[str, Any]]
    """prompt, and replies: of each variant, None where it has none."""
    spent_usd: float | None
    notes: list[str]


def read_run(root: Path, run_id: str) -> Run:
    """A run below `root`. Raises UserError if it does not exist, or if its params.yaml is missing or does not match
    this version of the schema.
    """
    kept = kept_folder(root, run_id) / "params.yaml"
    if not kept.exists():
        raise UserError(
            f"run {run_id} cannot be compared: its parameters are not in {kept} any more. Put "
            "that file back, or name other runs."
        )
    findings = read_findings(root, kept_params(root, run_id), run_id)
    return Run(findings, completed_stages(root, run_id))


def compare_runs(root: Path, run_ids: Sequence[str]) -> Comparison:
    """The runs `run_ids` below `root`, each a variant. Raises what `read_run` raises."""
    runs = [read_run(root, run_id) for run_id in run_ids]
    base = dict(flat(_content(runs[0])))
    return compare(
        [
            Variant(
                run.id, {0: run}, [f"{key}={value}" for key, value in flat(_content(run)) if base.get(key) != value]
            )
            for run in runs
        ]
    )


def compare(
    variants: Sequence[Variant],
    margin: float = MARGIN,
    growth: Mapping[str, Mapping[str, float]] | None = None,
    spent_usd: float | None = None,
) -> Comparison:
    """Compare variants with the first of them."""
    runs = [run for variant in variants for run in variant.runs.values()]
    judge = judge_of(runs)
    shared = shared_stages(variants)
    results = [_result(variant, variants[0], judge, margin, shared) for variant in variants]
    order = ranking(
        [
            Costed(result.name, result.planned_usd, result.measured_usd, result.verdict in SAME)
            for result in results
            if result.planned_usd and result.measured_usd
        ]
    )
    first = [next(iter(variant.runs.values()), None) for variant in variants]
    return Comparison(
        judge=judge,
        margin=margin,
        variants=results,
        shared=shared,
        params=param_differences([_content(run) if run else {} for run in first]),
        pairs=order.pairs,
        pairs_ranked_right=order.right,
        chosen=order.chosen,
        cheapest=order.cheapest,
        regret=order.regret,
        growth=[
            fit for factor, sizes in (growth or {}).items() if (fit := _growth(factor, sizes, variants)) is not None
        ],
        samples=list(common_samples([run.findings.samples if run else () for run in first])),
        spent_usd=spent_usd,
        notes=list(_notes([run for run in first if run], runs)),
    )


def _result(variant: Variant, base: Variant, judge: str, margin: float, shared: Sequence[str]) -> VariantResult:
    seeds = [seed for seed in variant.runs if seed in base.runs]
    ours, theirs = [variant.runs[seed] for seed in seeds], [base.runs[seed] for seed in seeds]
    differs = _quality_difference(ours, theirs, judge) if ours else None
    stages = [stage for stage in STAGES if any(run.findings.ledger.stage(stage) for run in ours)]
    differing = [stage for stage in STAGES if stage not in (*shared, "evaluate")]
    measured, base_usd = (_cost(runs, "measured_usd", differing) for runs in (ours, theirs))
    cheaper = CHEAPER * (measured or 0.0) < (base_usd or 0.0)
    judged: Verdict = "not run" if not ours else verdict(differs, margin, cheaper)
    metrics = _metrics(ours)
    base_metrics = {name: value for name, value in _metrics(theirs).items() if name in metrics}
    return VariantResult(
        name=variant.name,
        changes=list(variant.changes),
        runs=[run.id for run in variant.runs.values()],
        verdict="base" if variant is base and ours else judged,
        reason=variant.reason,
        planned_usd=_cost(ours, "planned_usd", differing),
        measured_usd=measured,
        taught_nothing_usd=_mean([run.findings.ledger.taught_nothing_usd for run in ours]),
        seconds=_cost(ours, "measured_seconds", differing),
        stages={stage: usd for stage in stages if (usd := _cost(ours, "measured_usd", {stage})) is not None},
        quality=_mean([_quality(run, judge) for run in ours]),
        difference=None if variant is base else differs,
        metrics=metrics,
        differences={}
        if variant is base
        else {name: difference(value, metrics[name]) for name, value in base_metrics.items()},
    )


# ---------------------------------------------------------------- quality


def judge_of(runs: Sequence[Run]) -> str:
    """Whose judgement all runs have: gold, else judge, else reward."""
    golds = [run.findings.value("evaluate", f"gold_{run.model}") for run in runs]
    if runs and None not in golds:
        return "gold"
    wins = [run.findings.value("evaluate", "win_rate_judge") for run in runs]
    is_judged = None not in wins and all(run.model == "aligned" for run in runs)
    return "judge" if is_judged and runs else "reward"


def _quality(run: Run, judge: str) -> float | None:
    if judge == "gold":
        return run.findings.value("evaluate", f"gold_{run.model}")
    scores = reply_qualities(run, judge)
    if scores is not None and run.model == "student":
        return _mean(scores)
    return run.findings.value("evaluate", f"win_rate_{judge}")


def _quality_difference(ours: Sequence[Run], theirs: Sequence[Run], judge: str) -> Estimate | None:
    """Paired, prompt by prompt, where all replies were kept; else from the win rates."""
    replies = [[reply_qualities(run, judge) for run in runs] for runs in (ours, theirs)]
    kept = [[scores for scores in side if scores is not None] for side in replies]
    if all(len(side) == len(ours) for side in kept) and all(
        _prompts(mine) == _prompts(other) for mine, other in zip(ours, theirs, strict=True)
    ):
        return paired(*kept)
    rates = [_estimates(run).get(f"win_rate_{judge}") for run in (*theirs, *ours)]
    estimates = [rate for rate in rates if rate is not None]
    if judge != "gold" and len(estimates) == len(rates):
        before, after = estimates[: len(theirs)], estimates[len(theirs) :]
        return difference(average(before), average(after))
    means = [_mean([_quality(run, judge) for run in runs]) for runs in (ours, theirs)]
    return None if means[0] is None or means[1] is None else Estimate(means[0] - means[1])


def reply_qualities(run: Run, judge: str) -> list[float] | None:
    """Score of the reply to each prompt: its gold score; without one, whether the judge, or else the reward model,
    prefers it to the SFT model's (1, 0.5 for a tie, 0). None unless every reply was kept.
    """
    rows = run.findings.samples
    if not rows or len(rows) != run.findings.value("evaluate", "prompts"):
        return None
    key = {"gold": f"gold_{run.model}", "judge": "judge"}.get(judge)
    try:
        if key is not None:
            return [float(row[key]) for row in rows]
        pairs = [(float(row[f"reward_{run.model}"]), float(row["reward_sft"])) for row in rows]
    except (KeyError, TypeError, ValueError):
        return None
    return [0.5 if ours == theirs else float(ours > theirs) for ours, theirs in pairs]


def _prompts(run: Run) -> list[str]:
    return [str(row.get("prompt", "")) for row in run.findings.samples]


# ---------------------------------------------------------------- cost and metrics


def shared_stages(variants: Sequence[Variant]) -> list[str]:
    """Stages whose outputs are the same bytes in all variants, seed by seed."""
    everywhere = [variant for variant in variants if variant.runs]
    if len(everywhere) < 2:
        return []
    stages = dict.fromkeys(stage for run in everywhere[0].runs.values() for stage in run.outs)
    seeds = set[int].intersection(*(set(variant.runs) for variant in everywhere))
    return [
        stage
        for stage in stages
        if stage != "evaluate"
        and all(
            (outs := everywhere[0].runs[seed].outs.get(stage)) and outs == variant.runs[seed].outs.get(stage)
            for variant in everywhere
            for seed in seeds
        )
    ]


def _cost(runs: Sequence[Run], name: str, stages: Collection[str]) -> float | None:
    """Mean over the runs of a figure of those stages: planned_usd, measured_usd or seconds."""
    sums = []
    for run in runs:
        totals = [cost.total for cost in run.findings.reconciled.stages if cost.stage in stages]
        values = [value for total in totals if (value := getattr(total, name)) is not None]
        sums.append(sum(values) if values or not totals else None)
    return _mean(sums)


def _metrics(runs: Sequence[Run]) -> dict[str, Estimate]:
    estimates = [_estimates(run) for run in runs]
    return {
        metric.name: average([by_name[metric.name] for by_name in estimates])
        for metric in METRICS
        if estimates and all(metric.name in by_name for by_name in estimates)
    }


def _estimates(run: Run) -> dict[str, Estimate]:
    """The metrics of a run; intervals of another level than 95% are left out."""
    estimates, usual = {}, run.findings.params.evaluate.confidence == 0.95
    for metric in METRICS:
        value, low, high = (run.findings.value(metric.stage, f"{metric.name}{end}") for end in ("", "_low", "_high"))
        if value is not None:
            estimates[metric.name] = Estimate(value, low, high) if usual else Estimate(value)
    return estimates


def _growth(factor: str, sizes: Mapping[str, float], variants: Sequence[Variant]) -> Growth | None:
    """The exponents of the costs of the phases that do work, fitted to every run; None with fewer than two sizes."""
    points = []
    for variant in variants:
        for run in variant.runs.values() if variant.name in sizes else ():
            phases = [
                phase
                for stage in run.findings.reconciled.stages
                if stage.stage not in ("data", "evaluate")
                for name, phase in stage.phases.items()
                if name not in NOT_GROWING
            ]
            measured = sum(phase.measured_usd or 0.0 for phase in phases)
            planned = sum(phase.planned_usd or 0.0 for phase in phases)
            if measured > 0 and planned > 0:
                points.append((sizes[variant.name], measured, planned))
    point_sizes, measured_usd, planned_usd = zip(*points, strict=True) if points else ((), (), ())
    if len(set(point_sizes)) < 2:
        return None
    return Growth(
        factor=factor,
        sizes=list(point_sizes),
        measured_usd=list(measured_usd),
        planned_usd=list(planned_usd),
        exponent=exponent(point_sizes, measured_usd),
        planned_exponent=exponent(point_sizes, planned_usd).value,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


# ---------------------------------------------------------------- parameters, replies, notes


def _content(run: Run) -> dict[str, Any]:
    return run.findings.params.model_dump(mode="json")


def param_differences(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys whose values differ between the mappings that are not empty, in the order of the files."""
    listed = [dict(flat(content)) for content in contents]
    differences = {}
    for key in dict.fromkeys(key for values in listed for key in values):
        row = [values.get(key, ABSENT_PARAM) for values in listed if values]
        if any(value != row[0] for value in row):
            differences[key] = [values.get(key, ABSENT_PARAM) for values in listed]
    return differences


MOST_REPLIES = 40
"""Replies shown of all variants together."""


def common_samples(samples: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The first prompts that at least two runs have in their samples, with the row of each."""
    by_prompt = [{str(row.get("prompt", "")): row for row in rows} for rows in samples]
    prompts = dict.fromkeys(prompt for rows in by_prompt for prompt in rows)
    common = [prompt for prompt in prompts if sum(prompt in rows for rows in by_prompt) > 1]
    for prompt in common[: max(2, MOST_REPLIES // len(samples))]:
        yield {"prompt": prompt, "replies": [rows.get(prompt) for rows in by_prompt]}


def _notes(first: Sequence[Run], runs: Sequence[Run]) -> Iterator[str]:
    """`first` are the runs of one seed."""
    for stage, path, what in (
        ("reward", "models/reward", "reward models: scores and wins are each by the run's own"),
        ("data", "data/prepared", "data"),
    ):
        versions = {run.outs.get(stage, {}).get(path) for run in first} - {None}
        if len(versions) > 1:
            yield f"The runs have different {what}."
    for run in runs:
        if run.findings.ledger.state != "completed":
            yield (f"Run {run.id} is {run.findings.ledger.state}: stages that it did not reach are missing.")
        yield from (f"Run {run.id}: {note}" for note in run.findings.notes)
