"""Confidence of a planned number: a grade and its interval.

A  this machine's own past runs of the stage (costs/planning/accuracy.py)
B  inside the domain that the formulas were checked on: published measurements
   (costs/tables/checked.yaml), or a machine whose rates were measured
C  outside of it: the interval of B, twice as wide, and at least a factor of 1.5
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from config.records import LOOPS
from config.yaml_text import yaml_content
from costs.formulas.process_heap import TRAINER_STAGES
from costs.formulas.setting import Setting
from costs.planning.machine import was_timed
from costs.planning.plans import Interval, Plan

TABLES = Path(__file__).parent.parent / "tables"
CHECKED = ("checked.yaml", "checked_cpu.yaml")
"""Published measurements of others, and our own of calibrated machines."""
FEWEST_SOURCES = 3
"""Below it a kind of number is not counted as checked."""
MARGIN = 5.0
"""Factor of model size beyond the smallest and the largest checked."""
LEAST = 1.5
"""Half the narrowest interval of grade C, as a factor."""
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
    """Kind -> interval and domain."""
    rows: dict[str, Mapping[str, Any]] = {}
    for name in CHECKED:
        rows |= yaml_content((TABLES / name).read_text(encoding="utf-8"))
    return rows


def grade_of(kind: str, billions: float, generation: str, is_checked: bool = True) -> Grade:
    """The grade of a plan of one kind (`time of training lora`) for a model of `billions` of parameters on a
    generation of devices; `is_checked` is False for software that was never checked.
    """
    row = checked().get(kind)
    if row is None:
        return Grade("C", 1 / UNCHECKED, UNCHECKED, f"{kind}: nothing was checked")
    smallest, largest = row["billions"]
    if row["sources"] < FEWEST_SOURCES:
        low, high = min(float(row["low"]), 1 / UNCHECKED), max(float(row["high"]), UNCHECKED)
        return Grade("C", low, high, f"checked on {row['sources']} of {FEWEST_SOURCES} sources")
    why = next(
        (
            reason
            for reason, outside in (
                ("its software was not checked", not is_checked),
                (
                    f"a model of {_size(billions)}, checked from {_size(smallest)} to {_size(largest)}",
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
        sources = f" of {row['sources']} sources" if row["sources"] < row["rows"] else ""
        return Grade("B", low, high, f"{row['rows']} measurements{sources}")
    # twice as wide: the logarithms of its ends are doubled
    return Grade("C", min(low**2, 1 / LEAST), max(high**2, LEAST), why)


def _size(billions: float) -> str:
    return f"{billions:.3g}B" if billions >= 0.1 else f"{billions * 1e3:.3g}M"


def time_interval(setting: Setting, seconds: float) -> Interval:
    """What a stage of ours may take. On accelerators our software was never checked."""
    if setting.hardware.is_cpu:
        kind, is_checked = "time on a CPU", was_timed(setting)
    else:
        kind, is_checked = f"time of {_what(setting)}", False
    return _interval(setting, kind, is_checked, seconds)


def memory_interval(setting: Setting, peak_bytes: float) -> Interval:
    """What the memory of a stage of ours may turn out to be."""
    cpu = setting.hardware.is_cpu
    kind = "memory on a CPU" if cpu else f"memory of {_what(setting)}"
    return _interval(setting, kind, cpu, peak_bytes)


def _what(setting: Setting) -> str:
    """The kind of work, as the kinds of published measurements are named."""
    if setting.stage in LOOPS:
        return "a loop any"
    if setting.stage in TRAINER_STAGES:
        return f"training {setting.levers.tuning}"
    return "decoding any"


def _interval(setting: Setting, kind: str, is_checked: bool, planned: float) -> Interval:
    size = setting.model.parameters / 1e9
    grade = grade_of(kind, size, setting.hardware.generation, is_checked)
    return Interval(grade.letter, planned * grade.low, planned * grade.high, grade.why)


def reasons(plan: Plan) -> dict[str, list[str]]:
    """`B: 40 measurements` -> the stages that have a time or memory of that grade for that reason, the best grade
    first.
    """
    reasons: dict[str, list[str]] = {}
    for stage in plan.stages:
        for interval in (stage.time_interval, stage.memory_interval):
            if interval.high:
                stages = reasons.setdefault(f"{interval.grade}: {interval.why}", [])
                if stage.stage not in stages:
                    stages.append(stage.stage)
    return dict(sorted(reasons.items()))
