"""HTML and SVG as nested calls. Every text is escaped unless it was made here, so nothing a model
wrote can become markup.
"""

import html
from typing import Any


class Markup(str):
    """Text that is markup already; only `element` and `join` make it from outside text."""

    __slots__ = ()


Child = Any
"""Markup, text, a number, None (left out), or a list of these."""

VOID = frozenset({"meta", "br", "hr", "path", "line", "circle", "rect", "polyline"})
"""Elements without content."""

VISIBLE_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    127: "\u2421"
}
VISIBLE_CONTROLS |= dict.fromkeys(
    [*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"
) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
"""Control characters become symbols; direction overrides and lone surrogates, which would disorder
or break the page, become U+FFFD.
"""


def text(value: Any) -> Markup:
    """`value` escaped, control characters made visible."""
    return Markup(html.escape(str(value).translate(VISIBLE_CONTROLS), quote=True))


def element(tag: str, *children: Child, **attributes: Any) -> Markup:
    """`<tag ...>children</tag>`. `class_` is class, `_` in names is `-`; None and False attributes
    are left out.
    """
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in VOID and not children:
        return Markup(f"<{tag}{shown}/>")
    return Markup(f"<{tag}{shown}>{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Children one after another; text among them is escaped."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, list | tuple):
            parts.append(join(*child))
        else:
            parts.append(child if isinstance(child, Markup) else text(child))
    return Markup("".join(parts))


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    key = "viewBox" if name == "viewBox" else name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    return f' {key}="{text(f"{value:.6g}" if isinstance(value, float) else value)}"'
