"""The tables of `rlhf compare` and `rlhf study`."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reporting.comparison.runs import METRICS, Comparison
from reporting.comparison.words import (
    difference,
    estimate,
    interval,
    letter,
    param,
    remarks,
    sentence,
)
from reporting.numbers import ABSENT, decimal, usd
from reporting.sections.samples import shown_text

SIDE_BY_SIDE = 3
"""Most variants whose metrics, parameters and costs fit beside one another."""
SAMPLES = 3
"""Prompts whose replies are printed; the page has more."""


def comparison_view(found: Comparison, details: bool) -> Group:
    """A row for each variant and what follows from them; with `details` parameters, metrics, costs
    by stage and replies of the first SIDE_BY_SIDE variants too.
    """
    parts: list[Any] = [_variants(found), Text(), Text(sentence(found), style="bold")]
    parts += [Text(line) for line in remarks(found)]
    if details:
        parts += _details(found)
    if found.notes:
        parts += [Text(), *(Text(note, style="yellow") for note in found.notes)]
    return Group(*parts)


def _variants(found: Comparison) -> Table:
    table = _table("", "variant", "planned", "measured", found.judge, "difference", "verdict")
    for column in table.columns[2:6]:
        column.justify, column.no_wrap = "right", True
    for i, each in enumerate(found.variants):
        if each.verdict == "not run":
            table.add_row(letter(i), Text(each.name), "", "", "", "", f"not run: {each.reason}")
            continue
        table.add_row(
            letter(i),
            Text(each.name),
            usd(each.planned_usd),
            usd(each.measured_usd),
            decimal(each.quality),
            interval(each.difference),
            each.verdict,
        )
    return table


def _details(found: Comparison) -> Iterator[Any]:
    shown = found.variants[:SIDE_BY_SIDE]
    names = [letter(i) for i in range(len(shown))]
    yield from _titled("parameters that differ")
    table = _table("", *names)
    for key, values in found.params.items():
        table.add_row(Text(key), *(Text(param(value)) for value in values[: len(shown)]))
    yield table if found.params else Text("  The runs have the same parameters.")
    yield from _titled("results on held-out data")
    table = _table("", *names, *(f"{name} - A" for name in names[1:]))
    for metric in METRICS:
        if any(metric.name in each.metrics for each in shown):
            table.add_row(
                metric.title,
                *(estimate(each.metrics.get(metric.name), metric) for each in shown),
                *(difference(each.differences.get(metric.name), metric) for each in shown[1:]),
            )
    yield table
    yield from _titled("cost of making each stage's outputs, done once")
    table = _table("", *names)
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in dict.fromkeys(stage for each in shown for stage in each.stages):
        costs = [each.stages.get(stage) for each in shown]
        table.add_row(stage, *(ABSENT if cost is None else usd(cost) for cost in costs))
    table.add_row("total", *(usd(sum(each.stages.values())) for each in shown), style="bold")
    yield table
    if found.samples:
        yield from _titled(f"replies to {min(SAMPLES, len(found.samples))} prompts")
    for sample in found.samples[:SAMPLES]:
        yield Text(f"> {shown_text(sample['prompt'])}", style="bold")
        for name, row in zip(names, sample["replies"], strict=False):
            reply = ABSENT if row is None else shown_text(row.get("aligned", ""))
            yield Padding(Text(f"{name}: {reply or '(empty reply)'}"), (0, 0, 0, 2))


def _titled(words: str) -> list[Text]:
    return [Text(), Text(words, style="bold")]


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(Text(column))
    return table
