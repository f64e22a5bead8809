"""Charts of the pages: curves, dots, histograms and bars. This module computes what is drawn; templates/charts.html
draws it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from reporting.numbers import count, decimal, percent
from reporting.templating import macro

TEMPLATE = "charts.html"
WIDTH, WIDE = 320, 390
"""Size of a small and a large chart in SVG units; at the usual size a unit is about a pixel."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36
MOST_DOTS, MOST_POINTS = 400, 120

Point = tuple[float, float]


class Series(NamedTuple):
    """A named curve. `tone` is its CSS class: base, sft, aligned, accent, second, quiet."""

    name: str
    points: list[Point]
    tone: str = "accent"


class Reference(NamedTuple):
    """A horizontal line to compare with."""

    name: str
    value: float
    tone: str = "quiet"


class Dot(NamedTuple):
    """A point with the interval of its y value. `planned` is another x, drawn hollow; `caption` is printed beside it,
    `title` is its tooltip.
    """

    title: str
    x: float
    y: float
    low: float
    high: float
    tone: str = "accent"
    href: str | None = None
    planned: float | None = None
    caption: str = ""


class Part(NamedTuple):
    """A share of a total; `shown` is its formatted size."""

    name: str
    size: float
    shown: str
    tone: str


class Estimate(NamedTuple):
    """A number with its interval, if it has one; `shown` is its formatted value."""

    name: str
    value: float
    shown: str
    tone: str
    low: float | None = None
    high: float | None = None


class Scale(NamedTuple):
    """The linear map from `low` to pixel `start` and from `high` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class Plot(NamedTuple):
    """The frame of a chart: axes with the (value, label) of their ticks."""

    label: str
    """Description for screen readers."""
    width: int
    height: int
    x: Scale
    y: Scale
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_name: str
    y_name: str

    @property
    def kind(self) -> str:
        return "chart" if self.width == WIDTH else "chart wide"


def plot(
    label: str,
    xs: Sequence[float],
    ys: Sequence[float],
    x_name: str,
    y_name: str = "",
    *,
    width: int = WIDE,
    height: int = 280,
    steps: bool = False,
    shares: bool = False,
) -> Plot:
    """A frame around the data. The axes end at round numbers, an x axis of whole `steps` at the data. With `shares`
    the y axis is in percent.
    """
    x_range = spread(min(xs), max(xs)) if steps else (min(xs), max(xs))
    x_ticks, y_ticks = ticks(*x_range), ticks(min(ys), max(ys))
    x_low, x_high = x_range if steps else (x_ticks[0], x_ticks[-1])
    if steps:
        x_ticks = [tick for tick in x_ticks if tick == round(tick)]
    shown = zip(x_ticks, tick_labels(x_ticks), strict=True)
    return Plot(
        label,
        width,
        height,
        Scale(x_low, x_high, LEFT, width - RIGHT),
        Scale(y_ticks[0], y_ticks[-1], height - BOTTOM, TOP + (12 if y_name else 0)),
        [(value, name) for value, name in shown if x_low <= value <= x_high],
        list(zip(y_ticks, tick_labels(y_ticks, shares), strict=True)),
        x_name,
        y_name,
    )


def line_chart(
    series: Sequence[Series],
    label: str,
    x_name: str,
    references: Sequence[Reference] = (),
    height: int = 200,
    shares: bool = False,
    steps: bool = True,
) -> Markup:
    """Curves over steps, each with at least one point; `label` describes the chart. `shares` are shown in percent.
    Without `steps` the x axis takes any numbers.
    """
    curves = [Series(s.name, thinned(s.points), s.tone) for s in series]
    xs = [x for s in curves for x, _ in s.points]
    ys = [y for s in curves for _, y in s.points] + [reference.value for reference in references]
    if shares and min(ys) == max(ys):
        ys = [max(0.0, ys[0] - 0.05), min(1.0, ys[0] + 0.05)]
    xs = [*spread(min(xs), max(xs))]
    frame = plot(label, xs, ys, x_name, width=WIDTH, height=height, steps=steps, shares=shares)
    return macro(TEMPLATE, "curves", frame, curves, references, _probes(curves, frame, shares))


def _probes(curves: Sequence[Series], frame: Plot, shares: bool) -> list[dict[str, object]]:
    """Dots and values that appear while the pointer is near an x, for every x."""
    shown = percent if shares else decimal
    by_series = [dict(s.points) for s in curves]
    xs = sorted({x for s in curves for x, _ in s.points})
    places = [frame.x(x) for x in xs]
    edges = [frame.x.start, *((a + b) / 2 for a, b in pairwise(places)), frame.x.end]
    probes: list[dict[str, object]] = []
    for x, (start, right) in zip(xs, pairwise(edges), strict=True):
        here = [(s, values[x]) for s, values in zip(curves, by_series, strict=True) if x in values]
        place = count(x) if x == round(x) else decimal(0.0 if abs(x) < 1e-4 else x)
        values = ", ".join(f"{s.name} {shown(y)}" for s, y in here)
        label = f"{frame.x_name} {place}: {values}"
        dots = [(s.tone, y) for s, y in here]
        probes.append({"x": x, "left": start, "right": right, "dots": dots, "label": label})
    return probes


def frontier_chart(updates: Sequence[tuple[int, float, float]], label: str, x_name: str, y_name: str) -> Markup:
    """(update, x, y) as dots joined by a thin line, from pale (first) to full and large (last)."""
    stride = -(-len(updates) // MOST_DOTS)
    dots = [
        {"point": (x, y), "title": f"update {update}: {x_name} {decimal(x)}, {y_name} {decimal(y)}"}
        for update, x, y in [*updates[:-1:stride], updates[-1]]
    ]
    xs, ys = [x for _, x, _ in updates], [y for _, _, y in updates]
    return macro(TEMPLATE, "frontier", plot(label, xs, ys, x_name, y_name), dots)


def dots_chart(
    dots: Sequence[Dot],
    label: str,
    x_name: str,
    y_name: str,
    references: Sequence[Reference] = (),
    height: int = 300,
    shares: bool = False,
) -> Markup:
    """Dots with whiskers, on an x axis that starts at 0."""
    xs = [0.0, *(x for dot in dots for x in (dot.x, dot.planned) if x is not None)]
    ys = [y for dot in dots for y in (dot.low, dot.high)] + [line.value for line in references]
    frame = plot(label, xs, ys, x_name, y_name, height=height, shares=shares)
    return macro(TEMPLATE, "dots", frame, dots, references)


def reliability_chart(bins: Sequence[tuple[float, float, int]], label: str) -> Markup:
    """Confidence against accuracy: dots on the diagonal are well calibrated; bars at the bottom count the pairs.

    `bins`: (mean confidence, accuracy, pairs) of each.
    """
    start = min(0.5, *(confidence for confidence, _, _ in bins))
    lowest = min(start, *(accuracy for _, accuracy, _ in bins))
    names = "predicted probability", "share of pairs ranked correctly"
    shown = [
        {
            "confidence": x,
            "accuracy": y,
            "point": (x, y),
            "count": pairs,
            "bar": f"{pairs:,} pairs at confidence {decimal(x)}",
            "dot": f"confidence {decimal(x)}: right in {decimal(y)} of {pairs:,} pairs",
        }
        for x, y, pairs in bins
    ]
    frame = plot(label, (start, 1.0), (lowest, 1.0), *names, height=300)
    return macro(TEMPLATE, "reliability", frame, shown)


def column_chart(bars: Sequence[tuple[float, float, float]], label: str, x_name: str, tone: str = "accent") -> Markup:
    """A histogram: (left, right, height) of each column, from zero up."""
    ends, heights = (bars[0][0], bars[-1][1]), (0.0, max(tall for _, _, tall in bars))
    shown = [
        {
            "left": start,
            "right": right,
            "tall": tall,
            "title": f"{decimal(start)} to {decimal(right)}: {decimal(tall, 6)}",
        }
        for start, right, tall in bars
    ]
    frame = plot(label, ends, heights, x_name, width=WIDTH, height=200)
    return macro(TEMPLATE, "columns", frame, shown, tone)


def legend(series: Sequence[Series]) -> Markup:
    """The colours of the curves by name."""
    return macro(TEMPLATE, "legend", series)


def strip(parts: Sequence[Part], label: str) -> Markup:
    """One bar split in proportion, with a legend; empty parts are left out."""
    return macro(TEMPLATE, "strip", parts, label)


def bar_list(parts: Sequence[Part], label: str) -> Markup:
    """A bar per row; the longest has the full width."""
    most = max((part.size for part in parts), default=0) or 1.0
    return macro(TEMPLATE, "bar_list", parts, label, most)


def stacked_list(rows: Sequence[tuple[str, Sequence[Part], str]], label: str) -> Markup:
    """A bar per row, split into its parts, with a legend; the longest has the full width. A row is (name, parts,
    formatted size).
    """
    most = max((sum(part.size for part in parts) for _, parts, _ in rows), default=0) or 1.0
    by_name = {part.name: part for _, parts, _ in rows for part in parts if part.size > 0}
    return macro(TEMPLATE, "stacked_list", rows, label, most, list(by_name.values()))


def estimates(
    rows: Sequence[Estimate], label: str, low: float, high: float, mark: float | None = None, mark_name: str = ""
) -> Markup:
    """Each estimate as a dot with a whisker on a common axis from `low` to `high`; `mark` is a value to compare
    with.
    """

    def place(value: float) -> float:
        return 100 * min(1.0, max(0.0, (value - low) / (high - low)))

    return macro(TEMPLATE, "estimates", rows, label, place, mark, mark_name)


# ---------------------------------------------------------------- axes


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, about `about` of them, that cover [low, high].

    The first is at or below `low` and the last at or above `high`, so they can be the ends of an axis.
    """
    low, high = spread(low, high)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda size: abs(size - rough))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def spread(low: float, high: float) -> tuple[float, float]:
    """[low, high], widened a little if both are the same."""
    if high > low:
        return low, high
    return low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)


def tick_labels(values: Sequence[float], shares: bool = False) -> list[str]:
    """Tick labels, all with as many decimals as are needed to distinguish them; very small or large values have a
    power of ten.

    `shares` are fractions, shown in percent.
    """
    if shares:
        return [f"{shown}%" for shown in tick_labels([100 * value for value in values])]
    largest = max(abs(value) for value in values)
    if largest >= 1e6 or 0 < largest < 1e-3:
        exponent = math.floor(math.log10(largest))
        scaled = tick_labels([value / 10.0**exponent for value in values])
        return ["0" if value == 0 else f"{shown}e{exponent}" for value, shown in zip(values, scaled, strict=True)]
    step = min((b - a for a, b in pairwise(values)), default=largest or 1.0)
    decimals = next((d for d in range(6) if abs(round(step, d) - step) < step * 1e-6), 6)
    return [f"{value:,.{decimals}f}".replace("-", "−") for value in values]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of as many adjacent ones, so that a long curve stays small."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
