"""The pieces sections are built from: a section, a captioned picture, a table, a plain word where
something is missing.
"""

from collections.abc import Sequence

from reporting.markup import Child, Markup, element

MOST_SIDE_BY_SIDE = 3
"""Columns of a table that a phone shows beside one another."""


def section(name: str, title: str, lead: Child, *children: Child) -> Markup:
    """A part of the page with an anchor, a title and one line that says what it shows."""
    return element(
        "section",
        element("h2", title),
        element("p", lead, class_="lead") if lead else None,
        *children,
        id=name,
    )


def card(title: str, *children: Child, note: Child = None) -> Markup:
    """A picture or table under its name; `note` explains a term in one line."""
    return element(
        "div",
        element("h3", title),
        *children,
        element("p", note, class_="note") if note else None,
        class_="card",
    )


def grid(*children: Child, kind: str = "thirds") -> Markup:
    """Cards side by side, as many as there is room for: `thirds` or `halves` on a wide screen."""
    return element("div", *children, class_=f"grid {kind}")


def table(
    header: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    foot: Sequence[Child] | None = None,
    numbers: range = range(1, 99),
) -> Markup:
    """A table that scrolls sideways where it does not fit; the columns `numbers` are set to the
    right. On a phone one of many columns becomes a list of rows, each value beside its heading.
    """
    names = [cell if isinstance(cell, str) else None for cell in header]

    def line(cells: Sequence[Child], tag: str) -> Markup:
        return element(
            "tr",
            [
                element(
                    tag,
                    cell,
                    class_="number" if i in numbers else None,
                    data_name=names[i] if tag == "td" and i < len(names) else None,
                )
                for i, cell in enumerate(cells)
            ],
        )

    body = [
        element("thead", line(header, "th")),
        element("tbody", [line(row, "td") for row in rows]),
    ]
    if foot is not None:
        body.append(element("tfoot", line(foot, "td")))
    return element(
        "div",
        element("table", *body),
        class_="scroll" if len(header) <= MOST_SIDE_BY_SIDE else "scroll many",
        tabindex=0,
        role="region",
        aria_label=f"Table: {header[0]}",
    )


def missing(message: str) -> Markup:
    """Says plainly that there is nothing to show, and why."""
    return element("p", message, class_="missing")


def badge(content: str, tone: str) -> Markup:
    """A short state: good, bad, open, quiet."""
    return element("span", content, class_=f"badge {tone}")
