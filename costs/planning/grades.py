"""How sure a planned number is: a grade and the interval that goes with it.

A  this machine's own past runs of the stage (costs/planning/accuracy.py)
B  inside the domain that the formulas were checked on: published measurements
   (costs/tables/checked.yaml), or a machine whose rates were measured
C  outside of it: the interval of B, twice as wide
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

CHECKED = Path(__file__).parent.parent / "tables" / "checked.yaml"
FEWEST_SOURCES = 3
"""Below it a kind of number is not counted as checked."""
MARGIN = 2.0
"""Factor of model size beyond the smallest and the largest checked."""
UNCHECKED = 2.0
"""Half the interval of a kind that nothing was checked of, as a factor."""

Letter = Literal["A", "B", "C"]


@dataclass(frozen=True)
class Grade:
    """A letter, the factors (low, high) from a plan to what may be measured, and why."""

    letter: Letter
    low: float
    high: float
    why: str


@cache
def checked() -> Mapping[str, Mapping[str, Any]]:
    """The rows of checked.yaml: kind -> interval and domain."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(CHECKED.read_text(encoding="utf-8"), loader))


def grade_of(kind: str, billions: float, generation: str, known: bool = True) -> Grade:
    """The grade of a plan of one kind (`time of training lora`) for a model of so many billions of
    parameters on a generation of devices; `known` False for software that nothing was checked of.
    """
    row = checked().get(kind)
    if row is None:
        return Grade("C", 1 / UNCHECKED, UNCHECKED, f"{kind}: nothing was checked")
    smallest, largest = row["billions"]
    why = next(
        (
            reason
            for reason, outside in (
                (f"only {row['sources']} sources were checked", row["sources"] < FEWEST_SOURCES),
                ("its software was not checked", not known),
                (
                    f"{billions:.3g} billion parameters, checked from {smallest:g} to {largest:g}",
                    not smallest / MARGIN <= billions <= largest * MARGIN,
                ),
                (f"no {generation} device was checked", generation not in row["generations"]),
            )
            if outside
        ),
        None,
    )
    low, high = float(row["low"]), float(row["high"])
    if why is None:
        return Grade("B", low, high, f"{row['rows']} measurements of {row['sources']} sources")
    # twice as wide: the logarithms of its ends are doubled
    return Grade("C", low**2, high**2, why)
