"""The planner against published measurements, each source planned by rates that were fitted to the other sources
alone.
"""

import math
from functools import cache

import pytest

from benchmarks.published import checked
from benchmarks.published.errors import compare, signed_quantile, summary, weighted_quantile
from benchmarks.published.measurements import Case
from benchmarks.published.row import LOOPS
from benchmarks.published.table import ROWS, estimates, published, read_table
from costs.planning.grades import grade_of
from costs.tables.rates import EFFICIENCY


@cache
def held_out() -> list[Case]:
    return checked.held_out(published())


def test_memory_of_training_is_within_ten_percent_of_sources_that_were_held_out() -> None:
    summary_text = summary(held_out(), "memory of training", "A")
    assert (summary_text["rows"], summary_text["sources"]) == (108, 8)
    assert summary_text["median"] <= 0.10
    assert summary_text["p90"] <= 0.25


def test_time_of_training_is_within_a_quarter_and_not_biased() -> None:
    summary_text = summary(held_out(), "time of training", "A")
    assert summary_text["sources"] >= 7
    assert summary_text["median"] <= 0.25
    assert abs(summary_text["bias"]) <= 0.10


def test_half_of_the_loops_are_within_one_and_a_half_and_all_within_two_and_a_half() -> None:
    factors = [
        abs(case.factor)
        for case in held_out()
        if case.planning.setting.stage in LOOPS and case.group.startswith("time")
    ]
    assert len(factors) >= 45
    assert sum(factor <= math.log(1.5) for factor in factors) >= len(factors) / 2
    assert max(factors) <= math.log(2.5)


def test_decoding_is_within_thirty_percent() -> None:
    assert summary(held_out(), "time of decoding", "A")["median"] <= 0.30


def test_a_source_does_not_teach_the_rates_it_is_planned_by() -> None:
    rows = [row for row in published() if row.run.stage == "pretrain"]
    other = [
        row.model_copy(
            update={
                "measured": tuple(
                    item.model_copy(update={"value": item.value and 10 * item.value}) for item in row.measured
                )
            }
        )
        if row.source.startswith("MosaicML")
        else row
        for row in rows
    ]
    named = next(row.source for row in rows if row.source.startswith("MosaicML"))
    fits = [checked._Fit([row for row in item if row.run.device]) for item in (rows, other)]
    assert fits[0].without(named) == fits[1].without(named)
    assert fits[0].without("") != fits[1].without("")


def test_the_rates_in_use_are_close_to_those_fitted_to_every_source() -> None:
    fitted = checked.refitted(published())
    for name in checked.FITTED:
        assert getattr(EFFICIENCY, name) == pytest.approx(getattr(fitted, name), rel=0.08), name


def test_what_ran_out_of_memory_is_planned_as_not_fitting() -> None:
    out = [case for case in compare(published())[0] if case.quantity == "fits"]
    assert len(out) == 8
    assert all(case.measured is False and case.planned is False for case in out)


def test_the_interval_of_a_checked_formula_holds_what_was_measured() -> None:
    """In sample; docs/published-costs.md has the coverage of sources that were left out, 80% by construction."""
    result = [
        row
        for file in sorted(ROWS.glob("*.yaml"))
        for row in estimates(read_table(file))
        if row.get("basis") == "formula" and isinstance(row.get("measured"), float)
    ]
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in result)
    assert len(result) > 300
    assert 0.75 <= inside / len(result) <= 0.95


def test_outside_of_what_was_checked_the_interval_is_twice_as_wide() -> None:
    inside = grade_of("time of training full", 7.0, "ampere")
    assert inside.basis == "formula"
    for other in (
        grade_of("time of training full", 700.0, "ampere"),
        grade_of("time of training full", 7.0, "blackwell"),
        grade_of("time of training full", 7.0, "ampere", is_checked=False),
    ):
        assert other.basis == "unchecked"
        assert other.low == pytest.approx(min(inside.low**2, 1 / 1.5))
        assert other.high == pytest.approx(max(inside.high**2, 1.5))
    assert grade_of("time of dreams", 7.0, "ampere").basis == "unchecked"


def test_sources_weigh_the_same_however_many_rows_they_have() -> None:
    errors = [("many", 0.1)] * 99 + [("few", 0.5)]
    assert weighted_quantile(errors, 0.5) == 0.1
    assert weighted_quantile(errors, 0.6) == 0.5
    assert signed_quantile([("a", -0.3), ("b", 0.1)], 0.5) == -0.3


def test_half_and_double_weigh_the_same() -> None:
    comparison = compare(published())[0]
    case = next(case for case in comparison if case.quantity == "time" and case.measured)
    assert case.measured is not None
    assert case.factor == pytest.approx(math.log(float(case.planned) / float(case.measured)))
    rate = next(case for case in comparison if case.quantity == "throughput" and case.measured)
    assert rate.measured is not None
    assert rate.factor == pytest.approx(math.log(float(rate.measured) / float(rate.planned)))
