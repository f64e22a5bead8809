"""Errors between plan and measurement, and the rows of a whole table."""

import math
from collections.abc import Iterable
from statistics import median

from benchmarks.published.measurements import Case, cases
from benchmarks.published.row import Row
from config.errors import CostError
from costs.tables.rates import EFFICIENCY, Efficiency


def weighted_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of |error| in which every source weighs the same, however many rows it has."""
    return signed_quantile(((source, abs(error)) for source, error in errors), fraction)


def signed_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of the errors as they are, every source weighing the same."""
    pairs = list(errors)
    rows: dict[str, int] = {}
    for source, _ in pairs:
        rows[source] = rows.get(source, 0) + 1
    ordered = sorted((error, 1 / rows[source]) for source, error in pairs)
    total, passed = sum(weight for _, weight in ordered), 0.0
    for error, weight in ordered:
        passed += weight
        if passed >= fraction * total - 1e-9:  # a sum of equal shares is not exact
            return error
    return float("nan")


def compare(rows: Iterable[Row], rates: Efficiency = EFFICIENCY) -> tuple[list[Case], list[tuple[str, str]]]:
    """(comparisons, refused rows with their reasons) of typed rows."""
    result: list[Case] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            result.extend(cases(row, rates))
        except CostError as error:
            refused.append((row.id, str(error)))
    return result, refused


def summary(found: Iterable[Case], group: str, tier: str = "A") -> dict[str, float]:
    """Median, 90th percentile and bias of the factor between plan and measurement of one group and tier, sources
    weighing the same; and the plain median. As fractions: 0.1 is 10% off.
    """
    errors = [
        (case.source, case.factor)
        for case in found
        if case.group == group and case.tier == tier and case.quantity != "fits" and case.measured
    ]
    return {
        "rows": float(len(errors)),
        "sources": float(len({source for source, _ in errors})),
        "median": math.expm1(weighted_quantile(errors, 0.5)),
        "p90": math.expm1(weighted_quantile(errors, 0.9)),
        "bias": math.expm1(signed_quantile(errors, 0.5)),
        "plain_median": math.expm1(median(abs(error) for _, error in errors)) if errors else float("nan"),
    }
