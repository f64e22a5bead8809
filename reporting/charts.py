"""Pictures as inline SVG, drawn by hand rather than by matplotlib: their colours are the page's own
variables, so one picture is right in light and dark, their text is text, and a point tells its
value when the pointer is on it, without a line of JavaScript.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from reporting.markup import Markup, element
from reporting.numbers import count, decimal, percent
from reporting.scales import Scale, spread, thinned, tick_labels, ticks

WIDTH, WIDE = 320, 390
"""Units of a small and of a large picture; at their usual size on the page a unit is about a pixel.
"""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36
MOST_DOTS = 400

Point = tuple[float, float]
Format = Callable[[float], str]


class Series(NamedTuple):
    """A named curve. `tone` is the class that colours it: base, sft, aligned, accent, second,
    quiet.
    """

    name: str
    points: list[Point]
    tone: str = "accent"


class Reference(NamedTuple):
    """A horizontal line to compare with."""

    name: str
    value: float
    tone: str = "quiet"


class Frame(NamedTuple):
    """The two axes of a picture, from values to its units."""

    x: Scale
    y: Scale


def line_chart(
    series: Sequence[Series],
    label: str,
    x_name: str,
    references: Sequence[Reference] = (),
    height: int = 200,
    shares: bool = False,
    steps: bool = True,
) -> Markup:
    """Curves over steps, each of a point at least; `label` tells the picture to those who do not
    see it. `shares` are shown in percent. Without `steps` the x axis is of any numbers.
    """
    curves = [Series(s.name, thinned(s.points), s.tone) for s in series]
    xs = [x for s in curves for x, _ in s.points]
    ys = [y for s in curves for _, y in s.points] + [reference.value for reference in references]
    y_range = (min(ys), max(ys))
    if shares and y_range[0] == y_range[1]:
        y_range = (max(0.0, y_range[0] - 0.05), min(1.0, y_range[1] + 0.05))
    frame, axes = _axes(
        spread(min(xs), max(xs)), y_range, x_name, "", WIDTH, height, steps=steps, shares=shares
    )
    drawn = [_path(s.points, s.tone, frame) for s in curves]
    drawn += [_reference(reference, frame) for reference in references]
    return _picture(
        label,
        WIDTH,
        height,
        axes,
        drawn,
        _probes(curves, x_name, percent if shares else decimal, frame),
    )


def frontier_chart(
    updates: Sequence[tuple[int, float, float]],
    label: str,
    x_name: str,
    y_name: str,
    height: int = 280,
) -> Markup:
    """(update, x, y) as dots joined by a thin line, from pale (first) to full and large (last)."""
    stride = -(-len(updates) // MOST_DOTS)
    shown = [*updates[:-1:stride], updates[-1]]
    points = [(x, y) for _, x, y in shown]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    frame, axes = _axes((min(xs), max(xs)), (min(ys), max(ys)), x_name, y_name, WIDE, height)
    last = len(shown) - 1
    dots = []
    for i, (update, x, y) in enumerate(shown):
        title = element("title", f"update {update}: {x_name} {decimal(x)}, {y_name} {decimal(y)}")
        opacity = 0.25 + 0.75 * i / max(1, last)
        radius = 3.5 if i < last else 5.5
        dots.append(
            element(
                "circle",
                title,
                class_="dot accent",
                cx=frame.x(x),
                cy=frame.y(y),
                r=radius,
                fill_opacity=opacity,
            )
        )
    return _picture(label, WIDE, height, axes, [_path(points, "accent thin", frame), *dots])


class Dot(NamedTuple):
    """One thing among many, with the interval of its height, and where it leads."""

    name: str
    x: float
    y: float
    low: float
    high: float
    tone: str = "accent"
    href: str | None = None


def dots_chart(
    dots: Sequence[Dot], label: str, x_name: str, y_name: str, height: int = 300
) -> Markup:
    """A dot each, with a whisker; `y` is a share."""
    xs = [dot.x for dot in dots]
    ys = [y for dot in dots for y in (dot.low, dot.high)]
    frame, axes = _axes(
        (0.0, max(xs)), (min(0.5, *ys), max(0.5, *ys)), x_name, y_name, WIDE, height, shares=True
    )
    even = _reference(Reference("no difference", 0.5), frame)
    return _picture(label, WIDE, height, axes, [even, *(_dot(dot, frame) for dot in dots)])


def _dot(dot: Dot, frame: Frame) -> Markup:
    x = frame.x(dot.x)
    drawn = element(
        "g",
        element(
            "title", f"{dot.name}: {percent(dot.y)} ({percent(dot.low)} to {percent(dot.high)})"
        ),
        element(
            "line",
            class_=f"whisker {dot.tone}",
            x1=x,
            y1=frame.y(dot.low),
            x2=x,
            y2=frame.y(dot.high),
        ),
        element("circle", class_=f"dot {dot.tone}", cx=x, cy=frame.y(dot.y), r=4.5),
    )
    return element("a", drawn, href=dot.href) if dot.href else drawn


class CostDot(NamedTuple):
    """Something with a quality, and what it was planned to cost beside what it did cost."""

    name: str
    planned: float
    measured: float
    quality: float
    low: float
    high: float
    tone: str = "accent"
    is_named: bool = False
    """Its name stands beside it; of the others it appears under the pointer."""


def cost_chart(
    dots: Sequence[CostDot],
    label: str,
    x_name: str,
    y_name: str,
    references: Sequence[Reference] = (),
    height: int = 340,
) -> Markup:
    """A full dot at the measured cost, joined with a hollow one at the planned cost."""
    xs = [x for dot in dots for x in (dot.planned, dot.measured)]
    ys = [y for dot in dots for y in (dot.low, dot.high)] + [r.value for r in references]
    frame, axes = _axes((0.0, max(xs)), (min(ys), max(ys)), x_name, y_name, WIDE, height)
    drawn = [_reference(reference, frame) for reference in references]
    return _picture(label, WIDE, height, axes, [*drawn, *(_cost_dot(dot, frame) for dot in dots)])


def _cost_dot(dot: CostDot, frame: Frame) -> Markup:
    x, planned, y = frame.x(dot.measured), frame.x(dot.planned), frame.y(dot.quality)
    title = (
        f"{dot.name}: measured {decimal(dot.measured)}, planned {decimal(dot.planned)}; quality "
        f"{decimal(dot.quality)} ({decimal(dot.low)} to {decimal(dot.high)})"
    )
    low, high = frame.y(dot.low), frame.y(dot.high)
    return element(
        "g",
        element("title", title),
        element("line", class_=f"whisker {dot.tone}", x1=x, y1=low, x2=x, y2=high),
        element("line", class_=f"whisker {dot.tone}", x1=x, y1=y, x2=planned, y2=y),
        element("circle", class_=f"hollow {dot.tone}", cx=planned, cy=y, r=3.5),
        element("circle", class_=f"dot {dot.tone}", cx=x, cy=y, r=4.5),
        element("text", dot.name, class_="value", x=x, y=low + 14, text_anchor="middle")
        if dot.is_named
        else None,
    )


def reliability_chart(
    bins: Sequence[tuple[float, float, int]], label: str, height: int = 300
) -> Markup:
    """Confidence against accuracy: dots on the diagonal are confidence that can be believed; bars
    at the foot count the pairs.

    `bins`: (mean confidence, share right, pairs) of each.
    """
    left = min(0.5, *(confidence for confidence, _, _ in bins))
    lowest = min(left, *(accuracy for _, accuracy, _ in bins))
    frame, axes = _axes(
        (left, 1.0),
        (lowest, 1.0),
        "predicted probability",
        "share of pairs it was right",
        WIDE,
        height,
    )
    most = max(count for _, _, count in bins)
    diagonal = element(
        "line",
        class_="quiet dashed",
        x1=frame.x(left),
        y1=frame.y(left),
        x2=frame.x(1),
        y2=frame.y(1),
    )
    curve = _path([(confidence, accuracy) for confidence, accuracy, _ in bins], "accent", frame)
    bars = [_pairs_bar(confidence, count, most, frame) for confidence, _, count in bins]
    dots = [_accuracy_dot(*one, frame) for one in bins]
    return _picture(label, WIDE, height, axes, [diagonal, *bars, curve, *dots])


def _pairs_bar(confidence: float, count: int, most: int, frame: Frame) -> Markup:
    tall = 44 * count / most
    return element(
        "rect",
        element("title", f"{count:,} pairs at confidence {decimal(confidence)}"),
        class_="bar quiet",
        x=frame.x(confidence) - 7,
        y=frame.y(frame.y.low) - tall,
        width=14,
        height=tall,
        rx=1.5,
    )


def _accuracy_dot(confidence: float, accuracy: float, count: int, frame: Frame) -> Markup:
    label = f"confidence {decimal(confidence)}: right in {decimal(accuracy)} of {count:,} pairs"
    return element(
        "circle",
        element("title", label),
        class_="dot accent",
        cx=frame.x(confidence),
        cy=frame.y(accuracy),
        r=4,
    )


def column_chart(
    bars: Sequence[tuple[float, float, float]],
    label: str,
    x_name: str,
    height: int = 200,
    tone: str = "accent",
) -> Markup:
    """A histogram: (left, right, height) of each column, from zero up."""
    frame, axes = _axes(
        (bars[0][0], bars[-1][1]),
        (0.0, max(tall for _, _, tall in bars)),
        x_name,
        "",
        WIDTH,
        height,
    )
    marks = []
    for left, right, tall in bars:
        title = element("title", f"{decimal(left)} to {decimal(right)}: {decimal(tall, 6)}")
        x, y = frame.x(left), frame.y(tall)
        width = max(0.5, frame.x(right) - x - 1)
        marks.append(
            element(
                "rect",
                title,
                class_=f"bar {tone}",
                x=x + 0.5,
                y=y,
                width=width,
                height=frame.y(0) - y,
            )
        )
    return _picture(label, WIDTH, height, axes, marks)


def _axes(
    x_range: Point,
    y_range: Point,
    x_name: str,
    y_name: str,
    width: int,
    height: int,
    steps: bool = False,
    shares: bool = False,
) -> tuple[Frame, list[Markup]]:
    """The frame, and its grid, tick labels and names. Axes end at round numbers; an x axis of
    `steps`, which are whole, at its data.
    """
    x_ticks, y_ticks = ticks(*x_range), ticks(*y_range)
    x_low, x_high = x_range if steps else (x_ticks[0], x_ticks[-1])
    if steps:
        x_ticks = [tick for tick in x_ticks if tick == round(tick)]
    top = TOP + (12 if y_name else 0)
    right = width - RIGHT
    frame = Frame(
        Scale(x_low, x_high, LEFT, right), Scale(y_ticks[0], y_ticks[-1], height - BOTTOM, top)
    )
    parts = []
    for value, shown in zip(y_ticks, tick_labels(y_ticks, shares), strict=True):
        y = frame.y(value)
        parts.append(element("line", class_="grid", x1=LEFT, y1=y, x2=right, y2=y))
        parts.append(element("text", shown, x=LEFT - 7, y=y + 4, text_anchor="end"))
    for value, shown in zip(x_ticks, tick_labels(x_ticks), strict=True):
        if x_low <= value <= x_high:
            parts.append(
                element(
                    "text", shown, x=frame.x(value), y=height - BOTTOM + 16, text_anchor="middle"
                )
            )
    parts.append(element("text", x_name, class_="name", x=right, y=height - 3, text_anchor="end"))
    if y_name:
        parts.append(element("text", y_name, class_="name", x=2, y=10))
    return frame, parts


def _path(points: Sequence[Point], tone: str, frame: Frame) -> Markup:
    if len(points) == 1:
        return element(
            "circle", class_=f"dot {tone}", cx=frame.x(points[0][0]), cy=frame.y(points[0][1]), r=3
        )
    joined = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return element("polyline", class_=f"curve {tone}", points=joined)


def _reference(reference: Reference, frame: Frame) -> Markup:
    y = frame.y(reference.value)
    below = y - frame.y.end < 14
    line = element(
        "line", class_=f"{reference.tone} dashed", x1=frame.x.start, y1=y, x2=frame.x.end, y2=y
    )
    name = element(
        "text",
        reference.name,
        class_="reference",
        x=frame.x.end,
        y=y + 12 if below else y - 4,
        text_anchor="end",
    )
    return element("g", line, name)


def _probes(curves: Sequence[Series], x_name: str, format_y: Format, frame: Frame) -> list[Markup]:
    """For every x, what appears while the pointer is over it: a line, a dot on each curve, the
    values. Style sheet: `.probe`.
    """
    by_series = [dict(s.points) for s in curves]
    xs = sorted({x for s in curves for x, _ in s.points})
    places = [frame.x(x) for x in xs]
    edges = [frame.x.start, *((a + b) / 2 for a, b in pairwise(places)), frame.x.end]
    probes = []
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        here = [(s, known[x]) for s, known in zip(curves, by_series, strict=True) if x in known]
        values = ", ".join(f"{s.name} {format_y(y)}" for s, y in here)
        probes.append(_probe(x, left, right, here, f"{x_name} {_place(x)}: {values}", frame))
    return probes


def _place(x: float) -> str:
    """A place on the x axis: steps and sizes as they are, anything else with three digits."""
    return count(x) if x == round(x) else decimal(0.0 if abs(x) < 1e-4 else x)


def _probe(
    x: float,
    left: float,
    right: float,
    here: Sequence[tuple[Series, float]],
    label: str,
    frame: Frame,
) -> Markup:
    """What appears while the pointer is between `left` and `right`."""
    place, top, foot = frame.x(x), frame.y.end, frame.y.start
    return element(
        "g",
        element(
            "rect",
            class_="catch",
            x=left,
            y=top,
            width=max(0.1, right - left),
            height=foot - top,
        ),
        element("line", class_="grid", x1=place, y1=top, x2=place, y2=foot),
        [
            element("circle", class_=f"dot {s.tone}", cx=place, cy=frame.y(y), r=3.5)
            for s, y in here
        ],
        element("text", label, class_="value", x=frame.x.end, y=top + 4, text_anchor="end"),
        class_="probe",
    )


def _picture(label: str, width: int, height: int, *parts: list[Markup]) -> Markup:
    kind = "chart" if width == WIDTH else "chart wide"
    return element(
        "svg", *parts, class_=kind, viewBox=f"0 0 {width} {height}", role="img", aria_label=label
    )


def legend(series: Sequence[Series]) -> Markup:
    """The colours of the curves by name."""
    return element(
        "ul",
        [element("li", element("i", class_=f"swatch {s.tone}"), s.name) for s in series],
        class_="legend",
    )
