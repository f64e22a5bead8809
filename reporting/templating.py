"""The Jinja2 templates of the pages. Values are escaped unless a template made them, so nothing a model wrote can
become markup.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

VISIBLE_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
VISIBLE_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd") | dict.fromkeys(
    range(0xD800, 0xE000), "\ufffd"
)
"""Control characters become symbols. Direction overrides and lone surrogates, which would disorder or break the page,
become U+FFFD.
"""


def printable(value: Any) -> Any:
    """Format a value for a template: None as nothing, numbers with six digits, text without control characters."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.translate(VISIBLE_CONTROLS) if type(value) is str else value


Child = Any
"""Markup, text, a number, None (left out), or a list of these."""


def join(*children: Child) -> Markup:
    """Children one after another; text among them is escaped."""
    parts = (join(*child) if isinstance(child, list | tuple) else child for child in children)
    return Markup("").join(part if isinstance(part, Markup) else escape(printable(part)) for part in parts)


def figure_name(parts: Sequence[str]) -> str:
    """The `data-figure` of a number on a page, from the words that a reader finds it by, its row and its column:
    `sft.train.planned_cost`.
    """
    words = (re.sub(r"\W+", "_", Markup(part).striptags().lower()).strip("_") for part in parts)
    return ".".join(filter(None, words))


@cache
def environment() -> Environment:
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=printable,
    )
    jinja.filters["figure"] = figure_name
    return jinja


def macro(template: str, name: str, *values: Any, **options: Any) -> Markup:
    """The output of a template's macro for these values."""
    html: Markup = getattr(environment().get_template(template).module, name)(*values, **options)
    return html
