"""How sure a planned number is: what it rests on, in words, and its interval.

measured here  this machine's own runs of the stage, or a calibration (costs/planning/machine.py)
formula        inside the domain that the formulas were checked on: published measurements (costs/tables/checked.yaml)
unchecked      outside of it: the interval of formula, twice as wide, and at least a factor of 1.5
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import Any, Literal

from config.records import LOOPS
from config.yaml_text import yaml_content
from costs.formulas.setting import TRAINER_STAGES, Setting
from costs.planning.machine import Timings, deviation, timings
from costs.planning.plans import Interval, Plan

TABLES = Path(__file__).parent.parent / "tables"
CHECKED = ("checked.yaml", "checked_cpu.yaml")
"""Published measurements of others, and our own of calibrated machines."""
FEWEST_SOURCES = 3
"""Below it a kind of number is not counted as checked."""
MARGIN = 5.0
"""Factor of model size beyond the smallest and the largest checked."""
LEAST = 1.5
"""Half the narrowest interval outside of what was checked, as a factor."""
UNCHECKED = 2.0
"""Half the interval of a kind that nothing was checked of, as a factor."""

Basis = Literal["measured here", "formula", "unchecked"]


@dataclass(frozen=True)
class Grade:
    """What a number rests on, the factors (low, high) from a plan to what may be measured, and why."""

    basis: Basis
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
        return Grade("unchecked", 1 / UNCHECKED, UNCHECKED, f"{kind}: nothing was checked")
    smallest, largest = row["billions"]
    if row["sources"] < FEWEST_SOURCES:
        low, high = min(float(row["low"]), 1 / UNCHECKED), max(float(row["high"]), UNCHECKED)
        return Grade("unchecked", low, high, f"checked on {row['sources']} of {FEWEST_SOURCES} sources")
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
        return Grade("formula", low, high, f"{row['rows']} measurements{sources}")
    # twice as wide: the logarithms of its ends are doubled
    return Grade("unchecked", min(low**2, 1 / LEAST), max(high**2, LEAST), why)


def _size(billions: float) -> str:
    return f"{billions:.3g}B" if billions >= 0.1 else f"{billions * 1e3:.3g}M"


def time_interval(setting: Setting, seconds: float, units: Mapping[str, float]) -> Interval:
    """What a stage of ours may take. On accelerators our software was never checked."""
    if runs := timings(setting):
        return _measured(runs, seconds, "time", deviation(runs, units))
    kind = "time on a CPU" if setting.hardware.is_cpu else f"time of {_what(setting)}"
    return _interval(setting, kind, False, seconds)


def memory_interval(setting: Setting, peak_bytes: float) -> Interval:
    """What the memory of a stage of ours may turn out to be."""
    if runs := timings(setting):
        return _measured(runs, peak_bytes, "memory", None)
    cpu = setting.hardware.is_cpu
    return _interval(setting, "memory on a CPU" if cpu else f"memory of {_what(setting)}", cpu, peak_bytes)


def fixed_interval(runs: Timings, seconds: float) -> Interval:
    """What a stage without a model may take."""
    if runs:
        return _measured(runs, seconds, "time", None)
    return Interval("unchecked", seconds / UNCHECKED, seconds * UNCHECKED, "measured on another machine")


def _measured(runs: Timings, planned: float, quantity: str, spread: float | None) -> Interval:
    """Twice the deviation of the runs, which holds four of five to come; as far as calibrated plans were off where
    there are too few.
    """
    row = checked()[f"{quantity} on a CPU"]
    low, high = (float(row["low"]), float(row["high"])) if spread is None else (exp(-2 * spread), exp(2 * spread))
    source = "run" if runs[0][0].run_id else "calibration"
    why = f"1 {source} of this machine" if len(runs) == 1 else f"{len(runs)} {source}s of this machine"
    return Interval("measured here", planned * low, planned * high, why)


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
    return Interval(grade.basis, planned * grade.low, planned * grade.high, grade.why)


def reasons(plan: Plan) -> dict[str, list[str]]:
    """`formula: 40 measurements` -> the stages whose time or memory rests on that."""
    reasons: dict[str, list[str]] = {}
    for stage in plan.stages:
        for interval in (stage.time_interval, stage.memory_interval):
            if interval.high:
                stages = reasons.setdefault(f"{interval.basis}: {interval.why}", [])
                if stage.stage not in stages:
                    stages.append(stage.stage)
    return reasons
