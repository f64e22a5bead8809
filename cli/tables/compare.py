"""The tables of `rlhf compare`."""

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reporting.compared.words import (
    difference,
    estimate,
    hacking,
    judged,
    letter,
    param,
    rows_changed,
    signed_usd,
    why,
)
from reporting.numbers import ABSENT, count, duration, usd
from reporting.sections.samples import shown_text
from reporting.verdict import verdict

if TYPE_CHECKING:
    from costs.ledger.cost_change import CostChange
    from reporting.compared.side_by_side import SideBySide

SAMPLES = 3
"""Prompts whose replies are printed; the HTML page has all."""


def compare_view(found: "SideBySide") -> Group:
    """Runs, parameters, data, results, costs, replies, notes."""
    parts: list[Any] = [_runs(found)]
    same = "The runs have the same parameters."
    parts += [
        *_title("parameters that differ"),
        _params(found) if found.params else Text(f"  {same}"),
    ]
    if found.data:
        parts += [*_title("data: rows, and rows that came (+) and went (−)"), _data(found)]
    if found.metrics:
        parts += [*_title("results"), _metrics(found)]
    for i, changes in enumerate(found.costs, start=1):
        parts += [
            *_title(f"cost of the work, done once: {letter(0)} and {letter(i)}"),
            _costs(changes, i),
        ]
    if found.samples:
        parts += [
            *_title(
                f"replies of the aligned models to {min(SAMPLES, len(found.samples))} of "
                f"{len(found.samples)} prompts"
            ),
            *_samples(found),
        ]
    return Group(
        *parts, *(Text(note, style="yellow") for note in ("", *found.notes) if found.notes)
    )


def _title(words: str) -> list[Text]:
    return [Text(), Text(words, style="bold")]


def _table(*columns: str, numbers: int = 1) -> Table:
    """Columns from `numbers` on are right-aligned."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i >= numbers else "left")
    return table


def _runs(found: "SideBySide") -> Table:
    table = _table("", "run", "result", "time", "cost", "saved", numbers=3)
    for i, side in enumerate(found.sides):
        book = side.findings.ledger
        result = verdict(side.findings).title if book.state == "completed" else book.state
        table.add_row(
            letter(i),
            Text(book.run_id),
            result,
            duration(book.total_seconds),
            usd(book.total_usd),
            usd(book.saved_usd),
        )
    return table


def _params(found: "SideBySide") -> Table:
    table = _table("", *_names(found), numbers=99)
    for row in found.params:
        table.add_row(Text(row.key), *(Text(param(value)) for value in row.values))
    return table


def _data(found: "SideBySide") -> Table:
    names = _names(found)
    table = _table("", *names, *names[1:])
    for row in found.data:
        rows = [count(number) if number is not None else ABSENT for number in row.rows]
        table.add_row(
            f"{row.dataset} {row.split}", *rows, *(rows_changed(change) for change in row.changes)
        )
    return table


def _metrics(found: "SideBySide") -> Table:
    names = _names(found)
    table = _table("", *names, *(f"{name} − {names[0]}" for name in names[1:]), numbers=99)
    for column in table.columns[: len(names) + 1]:
        column.no_wrap = True
    for row in found.metrics:
        remarks = [
            f"{difference(value, row.metric)} {judged(value)}".strip() for value in row.differences
        ]
        table.add_row(
            row.metric.title, *(estimate(value, row.metric) for value in row.estimates), *remarks
        )
    if (hacked := hacking(found)) is not None:
        table.add_row("Reward hacking", *hacked, *("" for _ in names[1:]))
    return table


def _costs(changes: "tuple[CostChange, ...]", i: int) -> Table:
    table = _table("", letter(0), letter(i), "change", "why")
    table.columns[-1].justify = "left"
    for change in changes:
        for part in (change, *change.phases):
            name = f"  {part.phase}" if part.phase else part.stage or "total"
            costs = (
                ABSENT if side is None else usd(side.usd) for side in (part.before, part.after)
            )
            cells = [name, *costs, signed_usd(part.usd), why(part, letter(0), letter(i))]
            table.add_row(*(Text(cell) for cell in cells), style="bold" if part is change else None)
    return table


def _samples(found: "SideBySide") -> list[Any]:
    lines: list[Any] = []
    for sample in found.samples[:SAMPLES]:
        lines.append(Text(f"> {shown_text(sample.prompt)}", style="bold"))
        replies = (
            ABSENT if row is None else shown_text(row.get("aligned", "")) or "(empty reply)"
            for row in sample.rows
        )
        lines += [
            Padding(Text(f"{letter(i)}: {reply}"), (0, 0, 0, 2)) for i, reply in enumerate(replies)
        ]
    return lines


def _names(found: "SideBySide") -> list[str]:
    return [letter(i) for i in range(len(found.sides))]
