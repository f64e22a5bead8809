"""Compares parameters, data, metrics, costs and replies of runs with those of the first run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from config.compose import flat
from costs.ledger.cost_change import CostChange, cost_changes
from reporting.inputs import Findings
from reporting.numbers import decimal, percent
from reporting.row_digests import Change, RowDigests, row_change
from reporting.sections.data import DATASETS, SPLITS
from reporting.verdict import usd_per_win_rate_point, verdict


class Side(NamedTuple):
    """A run, and the digests of its data and of its reward model."""

    findings: Findings
    data_version: str | None
    """DVC's digest of the prepared data; None if the run did not get that far."""
    rows: RowDigests | None
    """None if the rows of that version were not kept."""
    reward_version: str | None
    """DVC's digest of the reward model."""

    @property
    def run_id(self) -> str:
        return self.findings.ledger.run_id


class Estimate(NamedTuple):
    """A number with its interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


class Metric(NamedTuple):
    stage: str
    name: str
    title: str
    shown: Callable[[float | None], str]


SAME = Estimate(0.0, 0.0, 0.0)
"""The difference of two equal estimates, mostly of the same model on the same data."""

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
    Metric("evaluate", "win_rate_reward", "Wins, by reward", percent),
    Metric("evaluate", "reward_gain", "Reward gain", decimal),
    Metric("evaluate", "kl", "KL, nats per reply", decimal),
    Metric("evaluate", "length_aligned", "Reply tokens", decimal),
    Metric("evaluate", "eos_rate_aligned", "Replies that end", percent),
)


@dataclass(frozen=True)
class ParamDifference:
    key: str
    values: tuple[Any, ...]
    """One per run; ABSENT_PARAM where a run has no such key."""


ABSENT_PARAM = "(absent)"


@dataclass(frozen=True)
class SplitDifference:
    dataset: str
    split: str
    rows: tuple[int | None, ...]
    """One per run; None if it has no prepared data."""
    changes: tuple[Change | None, ...]
    """Difference from the first run, one for each other run; None where the rows of a version were
    not kept.
    """


@dataclass(frozen=True)
class MetricDifference:
    metric: Metric
    estimates: tuple[Estimate | None, ...]
    differences: tuple[Estimate | None, ...]
    """Other run minus first run, one for each other run."""


@dataclass(frozen=True)
class SampleReplies:
    prompt: Any
    rows: tuple[Mapping[str, Any] | None, ...]
    """Each run's row of evaluation/samples.jsonl; None where a run has no reply to this prompt."""


@dataclass(frozen=True)
class SideBySide:
    sides: tuple[Side, ...]
    params: tuple[ParamDifference, ...]
    data: tuple[SplitDifference, ...]
    metrics: tuple[MetricDifference, ...]
    costs: tuple[tuple[CostChange, ...], ...]
    """First run against each other run: stages with their phases, then the total."""
    samples: tuple[SampleReplies, ...]
    notes: tuple[str, ...]


def side_by_side(sides: Sequence[Side]) -> SideBySide:
    """Compare two or more runs with the first of them."""
    first, others = sides[0], sides[1:]
    return SideBySide(
        sides=tuple(sides),
        params=tuple(
            param_differences([side.findings.params.model_dump(mode="json") for side in sides])
        ),
        data=tuple(data_differences(sides)),
        metrics=tuple(metric_differences(sides)),
        costs=tuple(
            tuple(cost_changes(first.findings.ledger, other.findings.ledger)) for other in others
        ),
        samples=tuple(common_samples([side.findings.samples for side in sides])),
        notes=tuple(_notes(sides)),
    )


# ---------------------------------------------------------------- parameters and data


def param_differences(contents: Sequence[Mapping[str, Any]]) -> Iterator[ParamDifference]:
    """The dotted keys whose values differ between the mappings, in the order of the files."""
    listed = [dict(flat(content)) for content in contents]
    for key in dict.fromkeys(key for one in listed for key in one):
        values = tuple(one.get(key, ABSENT_PARAM) for one in listed)
        if any(value != values[0] for value in values):
            yield ParamDifference(key, values)


def data_differences(sides: Sequence[Side]) -> Iterator[SplitDifference]:
    """Rows per dataset and split, and how many were added and removed since the first run."""
    for dataset in DATASETS:
        for split in SPLITS:
            found = [side.findings.value("data", f"{dataset}_{split}_rows") for side in sides]
            if all(rows is None for rows in found):
                continue
            changes = tuple(
                _row_change(sides[0], other, f"{dataset}/{split}") for other in sides[1:]
            )
            yield SplitDifference(
                dataset,
                split,
                tuple(None if rows is None else round(rows) for rows in found),
                changes,
            )


def _row_change(first: Side, other: Side, name: str) -> Change | None:
    if first.data_version is not None and first.data_version == other.data_version:
        return Change(0, 0)
    return (
        row_change(first.rows, other.rows, name)
        if first.rows is not None and other.rows is not None
        else None
    )


# ---------------------------------------------------------------- metrics


def metric_differences(sides: Sequence[Side]) -> Iterator[MetricDifference]:
    """The metrics that at least one of the runs has."""
    for metric in METRICS:
        estimates = tuple(_estimate(side.findings, metric) for side in sides)
        if any(estimate is not None for estimate in estimates):
            levels = [side.findings.params.evaluate.confidence for side in sides]
            differences = tuple(
                _difference(estimates[0], estimate, levels[0] == level)
                for estimate, level in zip(estimates[1:], levels[1:], strict=True)
            )
            yield MetricDifference(metric, estimates, differences)


def _estimate(findings: Findings, metric: Metric) -> Estimate | None:
    value, low, high = (
        findings.value(metric.stage, f"{metric.name}{end}") for end in ("", "_low", "_high")
    )
    return None if value is None else Estimate(value, low, high)


def _difference(
    first: Estimate | None, other: Estimate | None, same_level: bool
) -> Estimate | None:
    if first is None or other is None:
        return None
    if first == other:
        return SAME
    found = difference(first, other)
    return found if same_level else Estimate(found.value)


def difference(first: Estimate, other: Estimate) -> Estimate:
    """other - first, with an interval if both have one of the same level.

    low = d - sqrt((other - other_low)^2 + (first_high - first)^2), high = d + sqrt((other_high -
    other)^2 + (first - first_low)^2). The two are taken as independent. Runs that answer the same
    prompts are mostly correlated, so the interval is too wide rather than too narrow.

    Source: Newcombe 1998, Interval estimation for the difference between independent proportions,
    Statistics in Medicine 17, method 10.
    """
    d = other.value - first.value
    if first.low is None or first.high is None or other.low is None or other.high is None:
        return Estimate(d)
    below = math.hypot(other.value - other.low, first.high - first.value)
    above = math.hypot(other.high - other.value, first.value - first.low)
    return Estimate(d, d - below, d + above)


def is_clear(difference: Estimate | None) -> bool | None:
    """Whether the interval of a difference excludes 0; None without an interval."""
    if difference is None or difference.low is None or difference.high is None:
        return None
    return not difference.low <= 0 <= difference.high


# ---------------------------------------------------------------- replies and notes


def common_samples(samples: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[SampleReplies]:
    """Prompts that at least two runs have in their samples, in the order of the first run that has
    them.
    """
    by_prompt = [{str(row.get("prompt", "")): row for row in rows} for rows in samples]
    for prompt in dict.fromkeys(prompt for one in by_prompt for prompt in one):
        rows = tuple(one.get(prompt) for one in by_prompt)
        answered = [row for row in rows if row is not None]
        if len(answered) > 1:
            yield SampleReplies(answered[0].get("prompt", ""), rows)


def _notes(sides: Sequence[Side]) -> Iterator[str]:
    judges = {side.reward_version for side in sides if side.reward_version is not None}
    if len(judges) > 1:
        yield (
            "The runs have different reward models: their scores and the wins they see are each "
            "judged by the run's own."
        )
    versions = [side.data_version for side in sides]
    if len(set(versions)) > 1 and any(
        side.rows is None and side.data_version is not None for side in sides
    ):
        yield (
            "Which rows came and went is not known: a version of the data was made before rows "
            "were remembered (runs/data/rows)."
        )
    for side in sides:
        if side.findings.ledger.state != "completed":
            yield (
                f"Run {side.run_id} is {side.findings.ledger.state}: stages that it did not "
                "reach are missing."
            )
        yield from (f"Run {side.run_id}: {note}" for note in side.findings.notes)


# ---------------------------------------------------------------- JSON


def as_dict(found: SideBySide) -> dict[str, Any]:
    """The JSON of `rlhf compare --json`. Lists over runs are in the order of `runs`, lists over
    other runs in that of runs[1:].
    """
    return {
        "runs": [_run(side) for side in found.sides],
        "params": [{"key": param.key, "values": list(param.values)} for param in found.params],
        "data": [
            {
                "dataset": row.dataset,
                "split": row.split,
                "rows": list(row.rows),
                "added": [change and change.added for change in row.changes],
                "removed": [change and change.removed for change in row.changes],
            }
            for row in found.data
        ],
        "metrics": [
            {
                "stage": row.metric.stage,
                "metric": row.metric.name,
                "values": [_numbers(value) for value in row.estimates],
                "differences": [
                    value and {**value._asdict(), "clear": is_clear(value)}
                    for value in row.differences
                ],
            }
            for row in found.metrics
        ],
        "costs": [[_change(change) for change in changes] for changes in found.costs],
        "samples": [
            {"prompt": sample.prompt, "replies": list(sample.rows)} for sample in found.samples
        ],
        "notes": list(found.notes),
    }


def _run(side: Side) -> dict[str, Any]:
    book = side.findings.ledger
    hacking = side.findings.metrics["evaluate"].get("reward_hacking")
    return {
        "run_id": book.run_id,
        "state": book.state,
        "started": book.started,
        "total_seconds": book.total_seconds,
        "total_usd": book.total_usd,
        "waste_usd": book.waste_usd,
        "saved_usd": book.saved_usd,
        "usd_per_win_rate_point": usd_per_win_rate_point(side.findings),
        "verdict": verdict(side.findings).title,
        "reward_hacking": hacking if isinstance(hacking, bool) else None,
        "data_version": side.data_version,
        "reward_version": side.reward_version,
    }


def _numbers(value: Estimate | None) -> dict[str, float | None] | None:
    return None if value is None else value._asdict()


def _change(change: CostChange) -> dict[str, Any]:
    works = {
        name: work
        and {**work._asdict(), "usd": work.usd, "tokens_per_second": work.tokens_per_second}
        for name, work in (("before", change.before), ("after", change.after))
    }
    row = {
        "stage": change.stage or "total",
        "phase": change.phase,
        **works,
        "change_usd": change.usd,
        "reasons": dict(change.reasons),
    }
    return {**row, "phases": [_change(phase) for phase in change.phases]} if change.phases else row
