"""The planner against published measurements: figures of tier A, and what is refused.

tests/fixtures/published_costs.jsonl has one measurement a line: the setting and the numbers as its
source prints them, with the source's title and address. Tier A: the setting is complete enough for
a direct check; B: one or two settings are inferred or unknown.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from costs.published.measurements import (
    Case,
    compare,
    feasibility,
    signed_quantile,
    summary,
    weighted_quantile,
)
from costs.published.table import estimates

TABLE = Path(__file__).parents[2] / "fixtures" / "published_costs.jsonl"


@cache
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@cache
def cases() -> list[Case]:
    return compare(rows())[0]


def test_memory_of_training_of_tier_a_is_close_where_sources_weigh_the_same() -> None:
    found = summary(cases(), "memory of training", "A")
    assert found["rows"] >= 120
    assert found["sources"] >= 9
    assert found["median"] <= 0.16
    assert found["p90"] <= 0.40


def test_time_of_training_of_tier_a_is_within_thirty_percent() -> None:
    found = summary(cases(), "time of training", "A")
    assert found["rows"] >= 100
    assert found["sources"] >= 7
    assert found["median"] <= 0.20
    assert abs(found["bias"]) <= 0.12


def test_loops_of_tier_a_are_within_a_factor_of_two_and_a_half_and_most_within_one_and_a_half() -> (
    None
):
    factors = [abs(case.factor) for case in cases() if case.group == "time of a loop"]
    assert len(factors) >= 20
    assert max(factors) <= math.log(2.55)
    assert sum(factor <= math.log(1.5) for factor in factors) >= 0.7 * len(factors)


def test_time_of_decoding_of_tier_a_is_within_fifteen_percent() -> None:
    found = summary(cases(), "time of decoding", "A")
    assert found["sources"] >= 5
    assert found["median"] <= 0.15


@pytest.mark.parametrize("source", ["litgpt", "torchtune README HEAD"])
def test_sources_whose_code_was_read_are_close_in_memory(source: str) -> None:
    errors = [
        (case.source, case.factor)
        for case in cases()
        if case.source.startswith(source)
        and case.group == "memory of training"
        and case.tier == "A"
    ]
    assert errors
    assert weighted_quantile(errors, 0.5) <= 0.05


def test_what_ran_out_of_memory_is_planned_as_not_fitting() -> None:
    said = feasibility(rows())
    assert len(said) == 8
    assert all(out for _, out in said)


def test_at_least_nine_tenths_of_tier_a_are_planned() -> None:
    planned = {row["id"] for row in estimates(rows()) if "planned" in row}
    wanted = [row["id"] for row in rows() if row["tier"] == "A"]
    assert sum(name in planned for name in wanted) >= 0.9 * len(wanted)


def test_sources_weigh_the_same_however_many_rows_they_have() -> None:
    errors = [("many", 0.1)] * 99 + [("few", 0.5)]
    assert weighted_quantile(errors, 0.5) == 0.1
    assert weighted_quantile(errors, 0.6) == 0.5
    assert signed_quantile([("a", -0.3), ("b", 0.1)], 0.5) == -0.3


def test_half_and_double_weigh_the_same() -> None:
    case = next(case for case in cases() if case.quantity == "time" and case.measured)
    assert case.measured is not None
    assert case.factor == pytest.approx(math.log(float(case.planned) / float(case.measured)))
    rate = next(case for case in cases() if case.quantity == "throughput" and case.measured)
    assert rate.measured is not None
    assert rate.factor == pytest.approx(math.log(float(rate.measured) / float(rate.planned)))
