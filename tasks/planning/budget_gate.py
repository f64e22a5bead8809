"""Checks a planned run against its budget, and suggests what would help."""

import math
import time
from pathlib import Path
from typing import TypeGuard

from config.errors import CostError
from config.records import CONTINUE
from config.schema import Params
from costs.ledger.budget import PER_HOUR, PER_MONTH, Excess, Limit, dear_hour, excess, total
from costs.planning.search import Goal, cheapest
from tasks.planning.prepared import Planned, Prepared, prepare
from tasks.run.changed_code import policy
from tasks.run.purse import Month, month

WORTH_TELLING = 0.01
"""Smaller savings are not worth a suggestion."""


def gate(root: Path, prepared: Prepared) -> str | None:
    """Refuse a run planned above its budget; returns a warning instead where `budget.gate` is warn, None if all is
    well.

    Raises CostError with the cheapest plan that fits, or with what the cheapest one needs.
    """
    if not isinstance(prepared, Planned):
        return None
    params = prepared.params
    problem = (
        excess(params.budget, prepared.spent, prepared.ahead)
        or dear_hour(params, prepared.ahead)
        or _dear_month(root, prepared)
    )
    if problem is None:
        return None
    where = f"{_month(root, params).words()}." if problem.limit.key == PER_MONTH else ""
    message = " ".join([*_started_over(prepared), _excess_message(problem), where]).strip()
    if params.budget.gate == "warn":
        ends = "" if problem.limit.key == PER_HOUR else ", and stops there"
        return f"{message} budget.gate is warn: the run starts{ends}."
    raise CostError(f"{message} {_advice(root, prepared, problem)}")


def _dear_month(root: Path, prepared: Planned) -> Excess | None:
    """The month's limit, if what its runs have cost and this one will is above it."""
    most, ahead = prepared.params.budget.monthly_usd, prepared.ahead_total.usd
    if most is None or not ahead:
        return None
    before = _month(root, prepared.params).spent_usd
    return Excess(Limit(PER_MONTH, most, "USD", None), before, ahead) if before + ahead > most else None


def _month(root: Path, params: Params) -> Month:
    return month(root, params, time.time(), every_run=True)


def _started_over(prepared: Planned) -> list[str]:
    """Stages that start over because their code has changed, and how to avoid it."""
    if not prepared.changed or policy() == CONTINUE:
        return []
    return [*map(str, prepared.changed), f"To go on instead: --changed-code {CONTINUE}."]


def _excess_message(exceeded: Excess) -> str:
    limit = exceeded.limit
    subject = limit.stage or "the run"
    before = f"{exceeded.spent:.4g} {limit.unit} are spent and " if exceeded.spent else ""
    return (
        f"{subject} is planned above its budget: {before}{exceeded.planned:.4g} {limit.unit} are planned, "
        f"{limit.key}={limit.value:g} does not allow it."
    )


def _advice(root: Path, prepared: Planned, exceeded: Excess) -> str:
    """Remedies: the cheapest levers, or a higher limit."""
    limit, params = exceeded.limit, prepared.params
    if limit.key == PER_HOUR:
        return (
            f"Give {limit.stage} fewer or cheaper devices (where, prices), raise {limit.key}, or "
            "set budget.gate=warn to start anyway."
        )
    anyway = "or set budget.gate=warn to start anyway and be stopped at it"
    fixed = limit.amount(prepared.fixed)
    if limit.stage is None and fixed > limit.value - exceeded.spent:
        return (
            f"The fixed cost alone is {fixed:.4g} {limit.unit} (starting processes, reading data): "
            f"no lever and no shorter training gets below it. Raise {limit.key}, {anyway}."
        )
    less = "train less"
    if limit.stage is None:
        fits = (limit.value - exceeded.spent - fixed) / (exceeded.planned - fixed)
        less += f" (about {fits:.0%} of the training fits)"
    goal: Goal = "usd" if limit.unit == "USD" else "time"
    cheaper = cheapest(params, prepared.target, tuple(prepared.ahead), goal)
    other = prepare(root, cheaper.params) if cheaper.changes else prepared
    needed = limit.amount(total(other.ahead, limit.stage)) if isinstance(other, Planned) else math.inf
    if needed > (1 - WORTH_TELLING) * exceeded.planned:
        return f"No lever makes it cheaper. Raise {limit.key}, {less}, {anyway}."
    options = " ".join(f"--set {change}" for change in cheaper.changes)
    if exceeded.spent + needed <= limit.value:
        return (
            f"The cheapest plan that fits needs {needed:.4g} {limit.unit}: {options}. Take it, "
            f"raise {limit.key}, {anyway}."
        )
    return f"Even the cheapest levers need {needed:.4g} {limit.unit} ({options}). Raise {limit.key}, {less}, {anyway}."


def needs_approval(prepared: Prepared) -> TypeGuard[Planned]:
    """Whether the run needs approval before it starts."""
    threshold = prepared.params.budget.approval_usd
    if not isinstance(prepared, Planned):  # which a threshold does not allow
        return False
    return threshold is not None and prepared.ahead_total.usd > threshold
