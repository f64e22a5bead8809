"""The elements that pages are built from; templates/parts.html has their markup."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from reporting.templating import Child, environment, figure_name, join, macro

TEMPLATE = "parts.html"
MOST_SIDE_BY_SIDE = 3
"""Columns of a table that fit beside one another on a phone."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: the browser refuses scripts and requests, whatever a model wrote."""


def document(
    title: str, head: Markup, content: Sequence[Child], commands: Sequence[str], foot: str = "The same for programs: "
) -> str:
    """A complete page with its style sheet. The footer names the commands that print the same as JSON."""
    style = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    template = environment().get_template("document.html")
    page = template.render(
        title=title, policy=POLICY, style=style, masthead=head, content=_markup(content), foot=foot, commands=commands
    )
    return page + "\n"


def masthead(
    title: str,
    run: str = "",
    stamp: Markup | None = None,
    sentence: str = "",
    facts: Iterable[tuple[str, str]] = (),
    notes: Iterable[str] = (),
) -> Markup:
    """The head of a page: title, badge, the result in a sentence, facts, and notices."""
    return macro(TEMPLATE, "masthead", title, run, stamp, sentence, list(facts), list(notes))


def tiles(shown: Iterable[tuple[str, str, str]]) -> Markup:
    """Key figures: (name, figure, remark)."""
    return macro(TEMPLATE, "tiles", list(shown))


def navigation(anchors: Sequence[tuple[str, str]]) -> Markup:
    """Links to the sections, (anchor, name)."""
    return macro(TEMPLATE, "navigation", anchors)


def section(name: str, title: str, lead: Child, *children: Child) -> Markup:
    """A section of the page with an anchor, a title and one line that describes it."""
    return macro(TEMPLATE, "section", name, title, lead, _markup(children))


def group(title: str | None, *children: Child) -> Markup:
    """Parts of a section under a subtitle."""
    return macro(TEMPLATE, "group", title, _markup(children))


def card(title: str, *children: Child, note: Child = None) -> Markup:
    """A chart or table under its name; `note` explains a term in one line."""
    return macro(TEMPLATE, "card", title, _markup(children), note)


def grid(*children: Child, kind: str = "thirds") -> Markup:
    """Cards side by side, `thirds` or `halves` on a wide screen."""
    return macro(TEMPLATE, "grid", _markup(children), f"grid {kind}")


def stack(*children: Child) -> Markup:
    """Cards stacked in a cell of a grid."""
    return macro(TEMPLATE, "grid", _markup(children), "stack")


def table(
    header: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    foot: Sequence[Child] | None = None,
    numbers: range = range(1, 99),
    row_names: Sequence[Sequence[str]] | None = None,
) -> Markup:
    """A table that scrolls sideways if it does not fit; the columns `numbers` are right-aligned. On a phone a table
    with many columns becomes a list of rows, with each value beside its heading. Each of these cells is named for
    programs by its row and its column (`data-figure`); a row by its first cells, or by `row_names` where those are not
    unique.
    """
    names = [cell if isinstance(cell, str) else "" for cell in header]
    lines = [_markup(cells) for cells in rows]
    wide = len(header) > MOST_SIDE_BY_SIDE
    bottom = foot and _markup(foot)
    keys = row_names or [cells[: numbers.start] for cells in [*lines, *([bottom] if bottom else [])]]
    figures = [[figure_name([*key, name]) for name in names] for key in keys]
    return macro(TEMPLATE, "table", header, lines, bottom, numbers, names, wide, figures)


def details(summary: str, *children: Child) -> Markup:
    """Content that is folded until it is opened."""
    return macro(TEMPLATE, "details", summary, _markup(children))


def paragraph(content: Child, kind: str = "plain") -> Markup:
    """`kind` is its CSS class: plain, note, missing."""
    return macro(TEMPLATE, "paragraph", join(content), kind)


def missing(message: str) -> Markup:
    """A notice that there is nothing to show, and why."""
    return paragraph(message, "missing")


def badge(content: str, tone: str) -> Markup:
    """A short status: good, bad, open, quiet."""
    return macro(TEMPLATE, "span", content, f"badge {tone}", None)


def remark(content: Child, title: str | None = None) -> Markup:
    """Small text under a cell's value; `title` is its tooltip."""
    return macro(TEMPLATE, "span", join(content), "remark", title)


def tagged(tag: str, content: Child, kind: str = "") -> Markup:
    """Text in an inline element such as `b`, `code` or `pre`."""
    return macro(TEMPLATE, "tagged", tag, join(content), kind)


def together(*children: Child) -> Markup:
    """Children without line breaks between them."""
    return macro(TEMPLATE, "span", join(*children), "together", None)


def link(content: str, href: str | None) -> Markup:
    """A link, or the bare text without an address."""
    return macro(TEMPLATE, "link", content, href)


def swatch(tone: str, name: str) -> Markup:
    """A name beside its colour."""
    return macro(TEMPLATE, "swatch", tone, name)


def bullets(items: Iterable[Child]) -> Markup:
    return macro(TEMPLATE, "bullets", _markup(list(items)))


def sample(turns: Sequence[Mapping[str, Any]], replies: Sequence[Mapping[str, Any]]) -> Markup:
    """A prompt (`speaker`, `content` of its turns) with replies (`tone`, `name`, `body`, `absent`, `scores`) side by
    side.
    """
    return macro(TEMPLATE, "sample", turns, replies)


def _markup(children: Sequence[Child]) -> list[Markup]:
    return [join(child) for child in children]
