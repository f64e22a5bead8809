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

CHECKED = Path(__file__).parent / "checked.yaml"
COVERED = 0.8
"""Share of the comparable measurements that an interval holds."""
NARROW = math.log(1.8)
"""Widest interval, end to end, of a grade B."""
FEWEST = 6
"""Comparable rows without which an interval is that of the wider kind."""
LEAST = 0.04
"""Half the narrowest interval, as a logarithm: what two runs of one program differ by."""

GENERATIONS = {"v100": "volta", "titan-rtx": "turing", "rtx20": "turing", "t4": "turing",
               "a100": "ampere", "a800": "ampere", "a10": "ampere", "a30": "ampere",
               "a40": "ampere", "a5000": "ampere", "a6000-ada": "ada", "a6000": "ampere",
               "rtx30": "ampere", "rtx40": "ada", "l4": "ada", "l2": "ada", "h": "hopper",
               "gh200": "hopper", "b": "blackwell", "gb200": "blackwell",
               "rtx50": "blackwell"}  # fmt: skip


@dataclass(frozen=True)
class Grade:
    """A letter, and the factors around the plan."""

    letter: str
    low: float
    high: float
    rows: int
    why: str


def generation(device: str) -> str:
    """The architecture of a device by its name."""
    fits = [prefix for prefix in GENERATIONS if device.startswith(prefix)]
    return GENERATIONS[max(fits, key=len)] if fits else device


def features(planning: Planned, group: str) -> dict[str, Any]:
    """What makes rows comparable."""
    setting, said = planning.setting, planning.printed
    return {
        "group": group,
        "tuning": setting.levers.tuning if "training" in group else None,
        "engine": setting.engine.name if said.engine is not None else None,
        "generation": generation(setting.hardware.name),
        "several": setting.gpus > 1,
        "quantised": setting.levers.quantisation is not None,
        "billions": round(setting.model.parameters / 1e9, 2),
    }


def checked_row(case: Case) -> dict[str, Any]:
    """One line of checked.yaml: the features, the source, and ln(planned / measured) of the number
    itself.
    """
    error = -case.factor if case.quantity == "throughput" else case.factor
    return features(case.planning, case.group) | {
        "source": case.source,
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


LEVELS: tuple[tuple[str, ...], ...] = (
    ("group", "tuning", "engine", "generation", "several", "quantised"),
    ("group", "tuning", "engine", "several"),
    ("group", "tuning", "generation", "several"),
    ("group", "tuning", "several"),
    ("group", "several"),
    ("group",),
)
"""From the closest rows to all of a kind; the first with enough rows gives the interval."""
INSIDE = 4
"""Levels of LEVELS that count as inside of what was checked."""


def grade(case: Case, rows: Iterable[Mapping[str, Any]] | None = None) -> Grade:
    """The grade of one plan and its interval as factors of it."""
    known = list(checked() if rows is None else rows)
    own = features(case.planning, case.group)
    for level, keys in enumerate(LEVELS):
        like = [row for row in known if all(row[key] == own[key] for key in keys)]
        if len(like) < FEWEST:
            continue
        low, high = _spread(like, case.quantity == "throughput")
        sizes = [row["billions"] for row in like]
        inside = min(sizes) / 3 <= own["billions"] <= 3 * max(sizes)
        guessed = [note for note in case.planning.assumptions if "assumed" in note]
        near = level < INSIDE and inside and math.log(high / low) <= NARROW and not guessed[2:]
        shared = ", ".join(f"{key} {own[key]}" for key in keys if own[key] is not None)
        return Grade("B" if near else "C", low, high, len(like), f"rows with the same {shared}")
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
