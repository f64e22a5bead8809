"""The planner against published measurements: figures of tier A, and that each miss is understood.

tests/fixtures/published_costs.jsonl has one measurement a line: the setting and the numbers as its
source prints them, with the source's title and address. Tier A: the setting is complete enough for
a direct check; B: one or two settings are inferred or unknown.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from config.errors import CostError
from costs.published.measurements import (
    Case,
    compare,
    feasibility,
    misses,
    summary,
    weighted_quantile,
)
from costs.published.printed import setting_of

TABLE = Path(__file__).parents[2] / "fixtures" / "published_costs.jsonl"


@cache
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@cache
def cases() -> list[Case]:
    return compare(rows())[0]


def test_memory_of_tier_a_is_within_ten_percent_and_twenty_at_the_90th_percentile() -> None:
    found = summary(cases(), "memory", "A")
    assert found["rows"] >= 50
    assert found["median"] <= 0.10
    assert found["p90"] <= 0.20


def test_time_of_tier_a_is_within_twenty_five_percent() -> None:
    found = summary(cases(), "time", "A")
    assert found["rows"] >= 100
    assert found["median"] <= 0.25


@pytest.mark.parametrize("source", ["litgpt", "torchtune README HEAD", "torchtune README @ca0"])
def test_no_source_of_memory_rows_stands_out(source: str) -> None:
    errors = [
        (case.source, case.error)
        for case in cases()
        if case.source.startswith(source) and case.quantity == "memory" and case.tier == "A"
    ]
    assert errors
    assert weighted_quantile(errors, 0.5) <= 0.05


def test_what_ran_out_of_memory_is_planned_as_not_fitting() -> None:
    said = feasibility(rows())
    assert len(said) == 8
    assert all(out for _, out in said)


def test_every_miss_has_its_reason() -> None:
    assert [case.id for case, why in misses(cases()) if why == "not understood"] == []


def test_what_is_not_compared_says_why() -> None:
    _, refused = compare(rows())
    assert all(
        "batch" in why or "not a measurement" in why or "not a known shape" in why
        for _, why in refused
    )


def test_sources_weigh_the_same_however_many_rows_they_have() -> None:
    errors = [("many", 0.1)] * 99 + [("few", 0.5)]
    assert weighted_quantile(errors, 0.5) == 0.1
    assert weighted_quantile(errors, 0.6) == 0.5


def row(**setting: Any) -> dict[str, Any]:
    printed = {
        "engine": "litgpt",
        "model": "Llama 2 7B",
        "gpu": "A100-SXM4-40GB",
        "gpus": 1,
        "micro_batch": 1,
        "longest_seq": 1304,
    }
    return {"setting": printed | setting, "source": {"title": "a table"}}


def test_printed_words_become_levers() -> None:
    levers = setting_of(
        row(tuning="lora r8 q,v", quant="bnb.nf4-dq", dtype="bf16-true", global_batch=128)
    ).levers
    assert (
        levers.tuning,
        levers.lora_rank,
        levers.lora_modules,
        levers.quantisation,
        levers.accumulation,
    ) == (
        "lora",
        8,
        ("q", "v"),
        "nf4-dq",
        128,
    )


def test_a_setting_without_its_batch_is_refused() -> None:
    printed = row()
    del printed["setting"]["micro_batch"]
    with pytest.raises(CostError, match="its batch is not stated"):
        setting_of(printed)


def test_a_setting_without_its_length_is_refused() -> None:
    printed = row()
    del printed["setting"]["longest_seq"]
    with pytest.raises(CostError, match="sequence length is not stated"):
        setting_of(printed)
