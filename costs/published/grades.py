"""How sure a plan of a published setting is: a grade and an interval, from the errors of comparable
rows (costs/published/checked.yaml, written by benchmarks/published_costs.py).

A: measured on this machine. B: inside of what the formulas were checked on, and checked closely. C:
outside, or checked with wide errors: the interval is that of everything of its kind.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from costs.published.measurements import Case, signed_quantile
from costs.published.settings import Planned
from costs.tables.catalogue import generation_of

CHECKED = Path(__file__).parent / "checked.yaml"
COVERED = 0.7
"""Share of the comparable measurements that an interval holds before it is widened to LEAST."""
NARROW = math.log(1.9)
"""Widest interval, end to end, of a grade B."""
LEAST = 0.15
"""Half the narrowest interval, as a logarithm: sources that nobody checked differ by as much."""
FEWEST = 2
"""Sources without which an interval is that of the wider kind."""


@dataclass(frozen=True)
class Grade:
    """A letter, and the factors around the plan."""

    letter: str
    low: float
    high: float
    rows: int
    why: str


def features(planning: Planned, group: str) -> dict[str, Any]:
    """What makes rows comparable."""
    setting, said = planning.setting, planning.printed
    return {
        "group": group,
        "tuning": setting.levers.tuning if "training" in group else None,
        "engine": setting.engine.name if said.engine is not None else None,
        "generation": generation_of(setting.hardware.name),
        "billions": round(setting.model.parameters / 1e9, 2),
    }


def checked_row(case: Case) -> dict[str, Any]:
    """One line of checked.yaml: the features, the source, and ln(planned / measured) of the number
    itself.
    """
    error = -case.factor if case.quantity == "throughput" else case.factor
    return features(case.planning, case.group) | {
        "source": case.source,
        "tier": case.tier,
        "error": round(error, 4),
        "rate": case.quantity == "throughput",
    }


@cache
def checked() -> tuple[Mapping[str, Any], ...]:
    """The rows of checked.yaml."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if not CHECKED.exists():
        return ()
    return tuple(yaml.load(CHECKED.read_text(encoding="utf-8"), loader) or ())


LEVELS: tuple[tuple[str, ...], ...] = (("group", "tuning"), ("group",))
"""From the closest rows to all of a kind; the first with enough sources gives the interval."""


def grade(case: Case, rows: Iterable[Mapping[str, Any]] | None = None) -> Grade:
    """The grade of one plan and its interval as factors of it."""
    known = [row for row in (checked() if rows is None else rows) if row["tier"] == "A"]
    own = features(case.planning, case.group)
    for keys in LEVELS:
        like = [row for row in known if all(row[key] == own[key] for key in keys)]
        if len({row["source"] for row in like}) < FEWEST:
            continue
        low, high = _spread(like, case.quantity == "throughput")
        kind = [row for row in known if row["group"] == own["group"]]
        sizes = [row["billions"] for row in kind]
        inside = (
            min(sizes) / 3 <= own["billions"] <= 3 * max(sizes)
            and own["engine"] is not None
            and own["generation"] in {row["generation"] for row in kind}
        )
        shared = ", ".join(f"{key} {own[key]}" for key in keys if own[key] is not None)
        letter = "B" if inside and math.log(high / low) <= NARROW else "C"
        return Grade(letter, low, high, len(like), f"rows with the same {shared}")
    return Grade("C", 1 / 3, 3.0, 0, "no comparable row: a factor of three")


def _spread(like: list[Mapping[str, Any]], rate: bool) -> tuple[float, float]:
    """Factors (low, high) that turn a plan into the range of what was measured."""
    # the error of a time is minus that of its throughput
    pairs = [
        (row["source"], -row["error"] if row["rate"] == rate else row["error"]) for row in like
    ]
    tail = (1 - COVERED) / 2
    low, high = signed_quantile(pairs, tail), signed_quantile(pairs, 1 - tail)
    return math.exp(min(low, -LEAST)), math.exp(max(high, LEAST))
