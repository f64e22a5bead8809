"""Budgets: spending, remaining amounts, whether a plan fits, and when a running stage has to stop. Pure.

Spent is what the ledger measures: wall seconds x devices paid for x price, failed attempts included, over a run and
the unfinished runs that it goes on from. Limits on hours are on the wall time of the stages.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from config.records import PipelineRow, UsageRow
from config.schema import Params
from config.sections.money import Budget
from costs.ledger.attempts import NO_WORK, Attempt
from costs.tables.price import StagePrice, stage_price

FREE_SECTIONS = ("budget", "prices", "retrain", "tracking", "where")
"""Sections of params.yaml that no result depends on."""


class Cost(NamedTuple):
    usd: float
    seconds: float
    """Wall time."""

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.usd + other.usd, self.seconds + other.seconds)


NOTHING = Cost(0.0, 0.0)


class Limit(NamedTuple):
    """One line of the budget, and its scope."""

    key: str
    """`budget.max_usd` and others, as in params.yaml."""
    value: float
    unit: str
    """USD or h."""
    stage: str | None
    """None: the entire run."""

    def amount(self, cost: Cost) -> float:
        """A cost in the limit's own unit."""
        return cost.usd if self.unit == "USD" else cost.seconds / 3600


def limits(budget: Budget) -> list[Limit]:
    """Every limit that is set."""
    run_limits = [("budget.max_usd", budget.max_usd, "USD"), ("budget.max_hours", budget.max_hours, "h")]
    limits = [Limit(key, value, unit, None) for key, value, unit in run_limits if value is not None]
    limits += [
        Limit(f"budget.max_usd_by_stage.{stage}", value, "USD", stage)
        for stage, value in budget.max_usd_by_stage.items()
    ]
    return limits + [
        Limit(f"budget.max_hours_by_stage.{stage}", value, "h", stage)
        for stage, value in budget.max_hours_by_stage.items()
    ]


class Excess(NamedTuple):
    """A limit exceeded by a plan."""

    limit: Limit
    spent: float
    planned: float
    """Planned cost still to come; both in the limit's unit."""


PER_MONTH, PER_HOUR = "budget.monthly_usd", "budget.max_usd_per_hour"


def all_limits(budget: Budget) -> list[Limit]:
    """All limits, including those on a month of runs and on the price of an hour."""
    others = [(PER_MONTH, budget.monthly_usd, "USD"), (PER_HOUR, budget.max_usd_per_hour, "USD/h")]
    return limits(budget) + [Limit(key, value, unit, None) for key, value, unit in others if value is not None]


def dear_hour(params: Params, stages: Iterable[str]) -> Excess | None:
    """The first stage whose devices cost more in an hour than they may."""
    most = params.budget.max_usd_per_hour
    if most is None:
        return None
    for stage in stages:
        hourly = stage_price(params, stage).usd(3600.0, params.where.of(stage).processes)
        if hourly > most:
            return Excess(Limit(PER_HOUR, most, "USD/h", stage), 0.0, hourly)
    return None


def total(costs: Mapping[str, Cost], stage: str | None = None) -> Cost:
    """The cost of a stage, or of all stages."""
    chosen = costs.values() if stage is None else [costs[stage]] if stage in costs else []
    return Cost(sum(cost.usd for cost in chosen), sum(cost.seconds for cost in chosen))


# ---------------------------------------------------------------- which runs share a budget


def predecessor(rows: Sequence[PipelineRow], params: Params, params_of: Callable[[str], Params | None]) -> str | None:
    """The run that a new one with `params` continues: the newest unfinished one for the same results.

    A run that went on from it and completed has completed it too; runs for other results in between change nothing.

    params_of  run id -> the params it kept, None where they cannot be read any more
    """
    completed = {row.run_id for row in rows if row.event == "end" and row.state == "completed"}
    done = {run_id for last in completed for run_id in chain(rows, last)}
    for run_id in dict.fromkeys(row.run_id for row in reversed(rows)):
        if run_id not in done and (kept := params_of(run_id)) is not None and same_results(kept, params):
            return run_id
    return None


def same_results(first: Params, second: Params) -> bool:
    """Whether two params differ only in money, placement, tracking and unused methods."""
    return _results(first) == _results(second)


def results_key(params: Params) -> str:
    """Digest of everything results depend on: equal for params for which `same_results` is true.

    It stands for a whole run, and is known before its first stage: outputs and code, which a stage's fingerprint
    includes, would make a run of its own of each that is continued with corrected code, with a budget of its own.
    """
    return hashlib.sha256(json.dumps(_results(params), sort_keys=True).encode()).hexdigest()[:16]


def _results(params: Params) -> dict[str, Any]:
    """The sections that results depend on."""
    return params.model_dump(mode="json", exclude={*FREE_SECTIONS, *params.unused})


def chain(rows: Sequence[PipelineRow], run_id: str | None) -> list[str]:
    """The run and those it continues, newest first."""
    before = {row.run_id: row.detail.get("continues") for row in rows if row.event == "start"}
    run_ids: list[str] = []
    while run_id and run_id not in run_ids:
        run_ids.append(run_id)
        run_id = before.get(run_id)
    return run_ids


def spent(attempts: Iterable[Attempt], run_ids: Sequence[str], price: StagePrice) -> Cost:
    """Cost of the attempts of a stage that belong to `run_ids`."""
    rows = [row for attempt in attempts if attempt.run_id in run_ids for row in attempt.usage]
    return Cost(price.usd_of_rows(rows), sum(row.seconds for row in rows))


# ---------------------------------------------------------------- the gate


def excess(budget: Budget, already: Mapping[str, Cost], planned: Mapping[str, Cost]) -> Excess | None:
    """The first limit exceeded by spent plus planned; none if nothing is left to do."""
    for limit in limits(budget):
        before, after = (limit.amount(total(costs, limit.stage)) for costs in (already, planned))
        if after > 0 and before + after > limit.value:
            return Excess(limit, before, after)
    return None


# ---------------------------------------------------------------- the watcher


class TimeLeft(NamedTuple):
    """Time left for a stage, and the limit behind it."""

    seconds: float
    limit: Limit


def time_left(
    budget: Budget, already: Mapping[str, Cost], stage: str, world_size: int, price: StagePrice
) -> TimeLeft | None:
    """Wall seconds that the tightest limit leaves to `stage` with this many processes; None without a limit."""
    remaining = []
    for limit in limits(budget):
        if limit.stage in (None, stage):
            rest = limit.value - limit.amount(total(already, limit.stage))
            per_second = price.usd(1.0, world_size) if limit.unit == "USD" else 1 / 3600
            remaining.append(TimeLeft(rest / per_second, limit))
    return min(remaining, default=None)


class Pace:
    """Duration of a stage's steps and checkpoints, from its usage rows."""

    REMEMBERED_STEPS = 5

    def __init__(self) -> None:
        self.save_seconds = 0.0
        """The longest checkpoint so far."""
        self._steps: dict[int, tuple[float, float]] = {}
        """Step -> (when it began, how long its phases took), the newest few."""

    def add(self, row: UsageRow, received_at: float) -> None:
        """Add the next row with its time of arrival: its own clock may be set, or be another machine's."""
        if row.phase == "save":
            self.save_seconds = max(self.save_seconds, row.seconds)
        elif row.phase not in NO_WORK and row.step > 0:
            began, took = self._steps.get(row.step, (received_at - row.seconds, 0.0))
            self._steps[row.step] = (began, took + row.seconds)
            for old in sorted(self._steps)[: -self.REMEMBERED_STEPS]:
                del self._steps[old]

    @property
    def step_seconds(self) -> float | None:
        """The longest of the last few steps; None before the first."""
        return max((took for _, took in self._steps.values()), default=None)

    def step_ends(self, now: float) -> float | None:
        """Expected end of the running step, in full steps from the start of the last recorded one."""
        step = self.step_seconds
        if not step:
            return None
        began = self._steps[max(self._steps)][0]
        return began + step * (int(max(0.0, now - began) / step) + 1)


def must_stop(pace: Pace, now: float, deadline: float) -> bool:
    """Whether to ask the stage to stop now, so that its checkpoint is written by `deadline`, when the budget is used
    up.

    It stops after the current step: so that has to be the last one that fits, with the checkpoint that follows. Before
    a pace is known, at the deadline. All times by one clock.
    """
    ends = pace.step_ends(now)
    step = pace.step_seconds
    if ends is None or step is None:
        return now + pace.save_seconds >= deadline
    return ends + step + pace.save_seconds > deadline
