"""The tables of `rlhf compare` and `rlhf study`."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reporting.comparison.runs import METRICS, Comparison
from reporting.comparison.words import difference, estimate, interval, letter, param, remarks, sentence
from reporting.numbers import ABSENT, decimal, usd
from reporting.sections.samples import shown_text

SIDE_BY_SIDE = 3
"""Most variants whose metrics, parameters and costs fit beside one another."""
SAMPLES = 3
"""Prompts whose replies are printed; the page has more."""


def comparison_view(comparison: Comparison, details: bool) -> Group:
    """A row for each variant and what follows from them; with `details` parameters, metrics, costs by stage and
    replies of the first SIDE_BY_SIDE variants too.
    """
    parts: list[Any] = [_variants(comparison), Text(), Text(sentence(comparison), style="bold")]
    parts += [Text(line) for line in remarks(comparison)]
    if details:
        parts += _details(comparison)
    if comparison.notes:
        parts += [Text(), *(Text(note, style="yellow") for note in comparison.notes)]
    return Group(*parts)


def _variants(comparison: Comparison) -> Table:
    table = _table("", "variant", "planned", "measured", comparison.judge, "difference", "verdict")
    for column in table.columns[2:6]:
        column.justify, column.no_wrap = "right", True
    for i, variant in enumerate(comparison.variants):
        if variant.verdict == "not run":
            table.add_row(letter(i), Text(variant.name), "", "", "", "", Text(f"not run: {variant.reason}"))
            continue
        table.add_row(
            letter(i),
            Text(variant.name),
            usd(variant.planned_usd),
            usd(variant.measured_usd),
            decimal(variant.quality),
            interval(variant.difference),
            variant.verdict,
        )
    return table


def _details(comparison: Comparison) -> Iterator[Any]:
    shown = comparison.variants[:SIDE_BY_SIDE]
    names = [letter(i) for i in range(len(shown))]
    yield from _titled("parameters that differ")
    table = _table("", *names)
    for key, values in comparison.params.items():
        table.add_row(Text(key), *(Text(param(value)) for value in values[: len(shown)]))
    yield table if comparison.params else Text("  The runs have the same parameters.")
    yield from _titled("results on held-out data")
    table = _table("", *names, *(f"{name} - A" for name in names[1:]))
    for metric in METRICS:
        if any(metric.name in variant.metrics for variant in shown):
            table.add_row(
                metric.title,
                *(estimate(variant.metrics.get(metric.name), metric) for variant in shown),
                *(difference(variant.differences.get(metric.name), metric) for variant in shown[1:]),
            )
    yield table
    yield from _titled("cost of making each stage's outputs, done once")
    table = _table("", *names)
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in dict.fromkeys(stage for variant in shown for stage in variant.stages):
        costs = [variant.stages.get(stage) for variant in shown]
        table.add_row(stage, *map(usd, costs))
    table.add_row("total", *(usd(sum(variant.stages.values())) for variant in shown), style="bold")
    yield table
    if comparison.samples:
        yield from _titled(f"replies to {min(SAMPLES, len(comparison.samples))} prompts")
    for sample in comparison.samples[:SAMPLES]:
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
