"""Errors of the planner on sources that it was not fitted to, and the grades that follow from them.

For each source the shared rates (costs/tables/rates.py) are fitted again to the other sources, and what was chosen by
looking at its software (launch times, see `CHOSEN`) is replaced by what others of its kind have. Its rows are then
planned and compared.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.published.engines import ENGINES
from benchmarks.published.errors import compare, signed_quantile
from benchmarks.published.measurements import Case
from benchmarks.published.row import Row
from costs.tables.engines import Engine
from costs.tables.rates import EFFICIENCY, Efficiency

CHECKED = Path(__file__).parents[2] / "costs" / "tables" / "checked.yaml"
FITTED = tuple(field.name for field in fields(Efficiency) if field.name != "host_flops")
PRIOR = 0.15
"""Standard deviation of the logarithm of a rate before any row is seen."""
NOISE = 0.25
"""Of the logarithm of a plan over its measurement."""
NUDGE = 0.02
"""Change of the logarithm of a rate by which its effect is measured."""
CHOSEN = ("op_seconds", "layer_ops", "lora_ops", "decode_layer_seconds", "prefill_launches")
"""Facts of an engine that were chosen by looking at measurements of it."""
COVERED = 0.85
"""Share of the measurements that an interval is made from."""
HELD = 0.8
"""Share of the measurements of a source that the intervals of others are to hold."""
WIDENINGS = tuple(1 + step / 10 for step in range(31))
LEAST = 0.05
"""Half the narrowest interval, as a logarithm: repeated measurements differ by as much."""


def held_out(rows: Sequence[Row]) -> list[Case]:
    """Every measurement, planned by what the other sources taught."""
    fit = _Fit(rows)
    result: list[Case] = []
    for source in sorted({row.source for row in rows}):
        rates = fit.without(source)
        source_rows = [_unknown_engine(row, rows) for row in rows if row.source == source]
        result += compare(source_rows, rates)[0]
    return result


def refitted(rows: Sequence[Row]) -> Efficiency:
    """The shared rates fitted to all sources."""
    return _Fit(rows).without("")


class _Fit:
    """Ridge regression of ln(planned / measured) on the logarithms of the rates. A source weighs as much as another,
    and an error beyond `NOISE` pulls no harder than one of `NOISE` (Huber).
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        start = _times(rows, EFFICIENCY)
        self.sources = [case.source for case in start]
        self.errors = np.array([case.factor for case in start])
        self.effects: npt.NDArray[np.float64] = np.stack(
            [
                (np.array([c.factor for c in _times(rows, _scaled({name: NUDGE}))]) - self.errors) / NUDGE
                for name in FITTED
            ],
            axis=1,
        )

    def without(self, source: str) -> Efficiency:
        """The rates fitted to all but one source."""
        kept = np.array([item != source for item in self.sources])
        x, y = self.effects[kept], self.errors[kept]
        names = [item for item in self.sources if item != source]
        weights = np.array([1 / math.sqrt(names.count(name)) for name in names])
        step = np.zeros(len(FITTED))
        for _ in range(20):
            residuals = y + x @ step
            pull = weights * np.minimum(1.0, NOISE / np.maximum(np.abs(residuals), 1e-9)) / NOISE**2
            normal = x.T @ (pull[:, None] * x) + np.eye(len(FITTED)) / PRIOR**2
            step = -np.linalg.solve(normal, x.T @ (pull * y))
        return _scaled(dict(zip(FITTED, step, strict=True)))


def _scaled(changes: dict[str, float]) -> Efficiency:
    """The shared rates, each times exp(change)."""
    return replace(EFFICIENCY, **{name: getattr(EFFICIENCY, name) * math.exp(by) for name, by in changes.items()})


def _times(rows: Iterable[Row], rates: Efficiency) -> list[Case]:
    return [case for case in compare(rows, rates)[0] if case.quantity in ("time", "throughput") and case.measured]


def _unknown_engine(row: Row, rows: Sequence[Row]) -> Row:
    """The row as if its software's speed were unknown: where no other source has it, its
    launch times are the median of other engines that launch in the same way.
    """
    row_engine = row.run.engine
    if row_engine is None or any(other.run.engine == row_engine and other.source != row.source for other in rows):
        return row
    like = [other for other in ENGINES.values() if other != row_engine and _way(other) == _way(row_engine)]
    changes = {name: median(getattr(other, name) for other in like) for name in CHOSEN}
    run = row.run.model_copy(update={"engine": replace(row_engine, **changes)})
    return row.model_copy(update={"run": run})


def _way(engine: Engine) -> tuple[bool, bool]:
    """A server, or a program that launches every operation; with fused modules or without."""
    return engine.op_seconds == 0, engine.fused_norm


def write(found: Iterable[Case]) -> None:
    """costs/tables/checked.yaml: for each kind of number the `interval` of measured / planned, and the domain that its
    measurements cover.
    """
    lines = [
        "# How far plans of published settings were off, by sources that they were not fitted to.",
        "# Written by python -m benchmarks.published_costs. low, high: factors on a plan that hold",
        f"# {HELD:.0%} of the measurements of a source that they do not come from; billions: of",
        "# parameters.",
    ]
    for (what, tuning), cases in sorted(kinds(found).items()):
        low, high = interval(cases)
        sizes = [case.planning.setting.model.parameters / 1e9 for case in cases]
        row = {
            "low": round(low, 3),
            "high": round(high, 3),
            "rows": len(cases),
            "sources": len({case.source for case in cases}),
            "billions": [round(min(sizes), 2), round(max(sizes), 2)],
            "generations": sorted({c.planning.setting.hardware.generation for c in cases}),
        }
        lines.append(f"{what} {tuning}: {json.dumps(row)}".replace('"', ""))
    CHECKED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def kind(case: Case) -> tuple[str, str]:
    """Measurements of one kind are planned by the same formulas."""
    training = case.group.endswith("training")
    return case.group, case.planning.setting.levers.tuning if training else "any"


def kinds(found: Iterable[Case]) -> dict[tuple[str, str], list[Case]]:
    """The measurements of tier A, by kind."""
    by_kind: dict[tuple[str, str], list[Case]] = {}
    for case in found:
        if case.measured and case.quantity != "fits" and case.tier == "A":
            by_kind.setdefault(kind(case), []).append(case)
    return by_kind


def interval(cases: Sequence[Case]) -> tuple[float, float]:
    """Factors (low, high) that turn a plan into the range of what is measured: as wide as it takes for the intervals
    of the other sources to hold `HELD` of the measurements of each.
    """
    low, high = quantiles(cases)
    wider = widening(cases)
    return low**wider, high**wider


def widening(cases: Sequence[Case]) -> float:
    """The smallest factor on the logarithms of intervals that holds `HELD` of the sources' measurements, each source's
    interval from the others; 1 where fewer than three sources say it.
    """
    if len({case.source for case in cases}) < 3:
        return 1.0
    return next((item for item in WIDENINGS if coverage(cases, item) >= HELD), WIDENINGS[-1])


def coverage(cases: Sequence[Case], wider: float = 1.0) -> float:
    """Share of the measurements inside of the intervals that come from the other sources, sources weighing the same:
    who plans has one of their own.
    """
    shares = []
    for source in sorted({case.source for case in cases}):
        low, high = quantiles([case for case in cases if case.source != source])
        inside = [low**wider <= math.exp(-case.factor) <= high**wider for case in cases if case.source == source]
        shares.append(sum(inside) / len(inside))
    return sum(shares) / len(shares)


def quantiles(cases: Iterable[Case]) -> tuple[float, float]:
    """The factors that hold `COVERED` of these measurements, sources weighing the same."""
    pairs = [(case.source, -case.factor) for case in cases]
    tail = (1 - COVERED) / 2
    low, high = signed_quantile(pairs, tail), signed_quantile(pairs, 1 - tail)
    return math.exp(min(low, -LEAST)), math.exp(max(high, LEAST))
