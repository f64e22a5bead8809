"""Rows read by a layout, without a file."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from training.preparation.cleaning import Refusal, TextRules
from training.preparation.columns import check_columns, column_names, recognised
from training.preparation.examples import Reading
from training.preparation.formats import Example
from training.preparation.sources import SourceRow, Table

RULES = TextRules(200, 100, ("<eos>",))


class Parsed(NamedTuple):
    """Everything that a table gives."""

    rows_read: int
    examples: list[Example]
    refusals: list[Refusal]
    ties: int
    replies_unranked: int
    trees: int
    warnings: tuple[str, ...]


def parse_table(
    table: Table, form: str, columns: Mapping[str, str], vote: str | None = None, rules: TextRules = RULES
) -> Parsed:
    reading = Reading(table, form, columns, vote, rules)
    items = list(reading)
    return Parsed(
        reading.rows_read,
        [item for item in items if isinstance(item, Example)],
        [item for item in items if isinstance(item, Refusal)],
        reading.ties,
        reading.replies_unranked,
        reading.trees,
        tuple(reading.warnings),
    )


def table_of(*rows: Any) -> Table:
    return Table("rows.jsonl", "line", [SourceRow(i, row) for i, row in enumerate(rows, start=1)])


def read_as(form: str, *rows: Any, rules: TextRules = RULES, convention: str | None = None, **columns: str) -> Parsed:
    names = column_names(form, columns, "data.source")
    return parse_table(table_of(*rows), form, names, convention, rules)


def read(*rows: Any, rules: TextRules = RULES, convention: str | None = None, **columns: str) -> tuple[str, Parsed]:
    """The layout that is recognised, and what it gives."""
    table = table_of(*rows)
    result = recognised(table, None, columns)
    names = column_names(result.form, result.columns, "data.source")
    check_columns(table, result.form, names, "data.source")
    parsed = parse_table(table, result.form, names, convention or result.vote, rules)
    return result.name or result.form, parsed
