"""The pieces that sections are built from: a section, a captioned picture, a table, a notice where
something is missing. templates/parts.html has their markup.
"""

from collections.abc import Sequence

from markupsafe import Markup

from reporting.markup import Child, element, join
from reporting.templating import macro

TEMPLATE = "parts.html"
MOST_SIDE_BY_SIDE = 3
"""Columns of a table that a phone shows beside one another."""


def section(name: str, title: str, lead: Child, *children: Child) -> Markup:
    """A part of the page with an anchor, a title and one line that says what it shows."""
    return macro(TEMPLATE, "section", name, title, lead, _made(children))


def card(title: str, *children: Child, note: Child = None) -> Markup:
    """A picture or table under its name; `note` explains a term in one line."""
    return macro(TEMPLATE, "card", title, _made(children), note)


def grid(*children: Child, kind: str = "thirds") -> Markup:
    """Cards side by side, as many as there is room for: `thirds` or `halves` on a wide screen."""
    return macro(TEMPLATE, "grid", _made(children), kind)


def table(
    header: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    foot: Sequence[Child] | None = None,
    numbers: range = range(1, 99),
) -> Markup:
    """A table that scrolls sideways if it does not fit; the columns `numbers` are right-aligned. On
    a phone a table with many columns becomes a list of rows, each value beside its heading.
    """
    names = [cell if isinstance(cell, str) else None for cell in header]
    lines = [_made(cells) for cells in rows]
    wide = len(header) > MOST_SIDE_BY_SIDE
    return macro(TEMPLATE, "table", header, lines, foot and _made(foot), numbers, names, wide)


def _made(children: Sequence[Child]) -> list[Markup]:
    return [join(child) for child in children]


def missing(message: str) -> Markup:
    """Says plainly that there is nothing to show, and why."""
    return element("p", message, class_="missing")


def badge(content: str, tone: str) -> Markup:
    """A short state: good, bad, open, quiet."""
    return element("span", content, class_=f"badge {tone}")
