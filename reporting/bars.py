"""Pictures made of HTML boxes, which keep their text readable at any width: shares of a whole,
bars, and estimates with their intervals.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from reporting.markup import Markup, element


class Part(NamedTuple):
    """A share of a whole."""

    name: str
    size: float
    shown: str
    """The size as people read it."""
    tone: str


class Estimate(NamedTuple):
    """A number with its interval, where it has one."""

    name: str
    value: float
    shown: str
    tone: str
    low: float | None = None
    high: float | None = None


def strip(parts: Sequence[Part], label: str) -> Markup:
    """One bar cut in proportion, with a legend; parts of no size are left out."""
    whole = sum(part.size for part in parts)
    kept = [part for part in parts if part.size > 0]
    cuts = [
        element(
            "span",
            class_=f"cut {part.tone}",
            style=f"flex-grow:{part.size / whole:.6f}",
            title=f"{part.name}: {part.shown}",
        )
        for part in kept
    ]
    legend = [
        element(
            "li",
            element("i", class_=f"swatch {part.tone}"),
            element("b", part.name),
            " ",
            part.shown,
            " · ",
            f"{100 * part.size / whole:.0f}%",
        )
        for part in kept
    ]
    return element(
        "figure",
        element("div", *cuts, class_="strip", role="img", aria_label=label),
        element("ul", *legend, class_="legend"),
    )


def bar_list(parts: Sequence[Part], label: str) -> Markup:
    """A bar a row, the longest over the full width."""
    most = max((part.size for part in parts), default=0) or 1.0
    rows = [
        element(
            "li",
            element("span", part.name, class_="bar-name"),
            element(
                "span",
                element(
                    "i", class_=f"fill {part.tone}", style=f"width:{100 * part.size / most:.2f}%"
                ),
                class_="track",
            ),
            element("span", part.shown, class_="bar-value"),
        )
        for part in parts
    ]
    return element("ul", *rows, class_="bars", aria_label=label)


def stacked_list(rows: Sequence[tuple[str, Sequence[Part], str]], label: str) -> Markup:
    """(name, parts, size as people read it) of each row: a bar cut into its parts, the longest over
    the full width, and a legend.
    """
    most = max((sum(part.size for part in parts) for _, parts, _ in rows), default=0) or 1.0
    items = []
    for name, parts, shown in rows:
        cuts = [
            element(
                "i",
                class_=f"cut {part.tone}",
                style=f"width:{100 * part.size / most:.2f}%",
                title=f"{part.name}: {part.shown}",
            )
            for part in parts
            if part.size > 0
        ]
        track = element("span", *cuts, class_="track parts")
        items.append(
            element(
                "li",
                element("span", name, class_="bar-name"),
                track,
                element("span", shown, class_="bar-value"),
            )
        )
    seen = {part.name: part.tone for _, parts, _ in rows for part in parts if part.size > 0}
    legend = [
        element("li", element("i", class_=f"swatch {tone}"), name) for name, tone in seen.items()
    ]
    return element(
        "figure",
        element("ul", *items, class_="bars", aria_label=label),
        element("ul", *legend, class_="legend"),
    )


def estimates(
    rows: Sequence[Estimate],
    label: str,
    low: float,
    high: float,
    mark: float | None = None,
    mark_name: str = "",
) -> Markup:
    """Each estimate as a dot with a whisker on a common axis from `low` to `high`; `mark` is a
    value to compare with.
    """

    def place(value: float) -> float:
        return 100 * min(1.0, max(0.0, (value - low) / (high - low)))

    items = [
        element(
            "li",
            element("span", row.name, class_="bar-name"),
            _estimate_track(row, mark, place),
            element("span", row.shown, class_="bar-value"),
        )
        for row in rows
    ]
    foot = (
        element("p", f"Vertical line: {mark_name}.", class_="note")
        if mark is not None and mark_name
        else None
    )
    return element("div", element("ul", *items, class_="bars", aria_label=label), foot)


def _estimate_track(row: Estimate, mark: float | None, place: Callable[[float], float]) -> Markup:
    """The axis of one estimate; `place`: where a value stands on it, in percent."""
    whisker = None
    if row.low is not None and row.high is not None:
        left, right = place(row.low), place(row.high)
        style = f"left:{left:.2f}%;width:{right - left:.2f}%"
        whisker = element("i", class_=f"whisker {row.tone}", style=style)
    return element(
        "span",
        None if mark is None else element("i", class_="mark", style=f"left:{place(mark):.2f}%"),
        whisker,
        element("i", class_=f"point {row.tone}", style=f"left:{place(row.value):.2f}%"),
        class_="track estimate",
    )
