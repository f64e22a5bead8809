"""Rows read by a layout, without a file."""

from typing import Any

from training.preparation.cleaning import TextRules
from training.preparation.columns import check_columns, column_names, recognised
from training.preparation.examples import parse_table
from training.preparation.formats import Parsed
from training.preparation.sources import SourceRow, Table

RULES = TextRules(200, 100, ("<eos>",))


def table_of(*rows: Any) -> Table:
    return Table("rows.jsonl", "line", [SourceRow(i, row) for i, row in enumerate(rows, start=1)])


def read_as(
    form: str, *rows: Any, rules: TextRules = RULES, convention: str | None = None, **columns: str
) -> Parsed:
    names = column_names(form, columns, "data.source")
    return parse_table(table_of(*rows), form, names, convention, rules)


def read(
    *rows: Any, rules: TextRules = RULES, convention: str | None = None, **columns: str
) -> tuple[str, Parsed]:
    """The layout that is recognised, and what it gives."""
    table = table_of(*rows)
    found = recognised(table, None, columns)
    names = column_names(found.form, found.columns, "data.source")
    check_columns(table, found.form, names, "data.source")
    parsed = parse_table(table, found.form, names, convention or found.vote, rules)
    return found.name or found.form, parsed
