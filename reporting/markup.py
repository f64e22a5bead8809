"""HTML as nested calls. Every text is escaped unless it was made here, so nothing a model wrote can
become markup.
"""

from typing import Any

from markupsafe import Markup, escape

from reporting.templating import printable

Child = Any
"""Markup, text, a number, None (left out), or a list of these."""

VOID = frozenset({"meta", "br", "hr", "path", "line", "circle", "rect", "polyline"})
"""Elements without content."""


def text(value: Any) -> Markup:
    """`value` escaped, control characters made visible."""
    return escape(printable(str(value)))


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
    return f' {key}="{text(printable(value))}"'
