"""The key picture of a run: where its time went, stage by stage and phase by phase, beside what it
brought.

A drawing that stands by itself, for pages that show markdown and pictures: its colours are its own,
on a card of its own, so that it can be read on a light and on a dark page.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from markupsafe import Markup

from reporting.charts import Estimate
from reporting.inputs import Findings
from reporting.markup import element, text
from reporting.numbers import decimal, duration, percent, usd

WIDTH, PANEL, GAP, MARGIN, ROW = 620, 276, 28, 20, 22
"""Units are pixels at full size; MLflow has this much room for a description, and does not shrink
what is wider.
"""
COLOURS = {
    "base": "#7d8896",
    "sft": "#3565b0",
    "aligned": "#0b7a6f",
    "ink": "#1b2430",
    "soft": "#5a6675",
    "track": "#eceff3",
    "line": "#e2e5ea",
}
PARTS = (
    "#64748b",
    "#3565b0",
    "#7a54b8",
    "#0b7a6f",
    "#b7791f",
    "#a23b5c",
    "#4d7c0f",
    "#0e7490",
    "#9a3412",
)
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


LEAST_SHARE = 0.01
"""Smaller parts are shown as one."""


class Spent(NamedTuple):
    """A part of a whole, by its time."""

    name: str
    seconds: float
    usd: float
    colour: str


def key_picture(findings: Findings) -> str:
    """The picture as an SVG document; parts that are not known are left out."""
    method = findings.params.align.method
    spent = _strip_panel("Time and cost of each stage", _stages(findings))
    phases = _strip_panel(f"Phases of {method}", _phases(findings))
    columns = [[spent, _quality_panel(findings)], [phases]]
    drawn, height = [], 0
    for i, panels in enumerate(columns):
        y = MARGIN + 12
        for panel, tall in panels:
            drawn.append(
                element("g", panel, transform=f"translate({MARGIN + i * (PANEL + GAP)} {y})")
            )
            y += tall + MARGIN
        height = max(height, y)
    card = element(
        "rect",
        x=0.5,
        y=0.5,
        width=WIDTH - 1,
        height=height - 1,
        rx=10,
        fill="#ffffff",
        stroke=COLOURS["line"],
    )
    return element(
        "svg",
        card,
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
        font_family=FONT,
        font_size=13,
        fill=COLOURS["ink"],
    )


def _stages(findings: Findings) -> list[Spent]:
    # a stage has its colour in every run, so that pictures can be compared
    names = findings.params.stages
    colours = {name: _colour(i) for i, name in enumerate(names)}
    return [
        Spent(stage.stage, stage.seconds, stage.usd, colours.get(stage.stage, COLOURS["base"]))
        for stage in findings.ledger.stages
    ]


def _phases(findings: Findings) -> list[Spent]:
    aligned = findings.ledger.stage(findings.params.align.method)
    return [
        Spent(phase.phase, phase.seconds, phase.usd, _colour(i))
        for i, phase in enumerate(aligned.phases if aligned else [])
    ]


def _colour(i: int) -> str:
    return PARTS[i % len(PARTS)]


def _folded(parts: Sequence[Spent]) -> list[Spent]:
    """The parts, the smallest of them as one at the end where they are several."""
    whole = sum(part.seconds for part in parts)
    small = [part for part in parts if part.seconds < LEAST_SHARE * whole]
    if len(small) < 2:
        return list(parts)
    seconds = sum(part.seconds for part in small)
    name = f"{len(small)} others" if seconds else f"{len(small)} reused"
    rest = Spent(name, seconds, sum(part.usd for part in small), COLOURS["base"])
    return [*(part for part in parts if part not in small), rest]


def _strip_panel(title: str, parts: Sequence[Spent]) -> tuple[Markup, int]:
    """One bar cut in proportion, and a row per part: name, time, cost, share. With its height."""
    whole = sum(part.seconds for part in parts)
    if not whole:
        return _nothing(
            title, "nothing was done: all outputs were reused" if parts else "not recorded"
        )
    kept = _folded(parts)
    starts = accumulate((part.seconds for part in kept), initial=0.0)
    bar = [
        element(
            "rect",
            x=PANEL * start / whole,
            y=14,
            width=max(0.0, PANEL * part.seconds / whole - 1),
            height=18,
            fill=part.colour,
        )
        for start, part in zip(starts, kept, strict=False)
    ]
    rows = []
    for i, part in enumerate(kept):
        y = 52 + i * ROW
        rows += [
            element("rect", x=0, y=y - 10, width=10, height=10, rx=2, fill=part.colour),
            element("text", part.name, x=16, y=y),
            _right(duration(part.seconds), 156, y),
            _right(usd(part.usd), 236, y),
            _right(percent(part.seconds / whole, 0), PANEL, y, COLOURS["soft"]),
        ]
    return element("g", _title(title), *bar, *rows), 48 + len(kept) * ROW


def _quality_panel(findings: Findings) -> tuple[Markup, int]:
    """Gold scores as bars where there are any, and win rates with their intervals."""
    marks: list[Markup] = []
    y = 28
    for name, model in (("base", "base"), ("SFT", "sft"), ("aligned", "aligned")):
        gold = findings.value("evaluate", f"gold_{model}")
        if gold is not None:
            marks += _bar(Estimate(f"gold, {name}", gold, decimal(gold), model), y)
            y += ROW
    for name, kind in (("wins, gold", "gold"), ("wins, reward", "reward")):
        rate, low, high = (
            findings.value("evaluate", f"win_rate_{kind}{end}") for end in ("", "_low", "_high")
        )
        if rate is not None:
            marks += _bar(Estimate(name, rate, percent(rate), "aligned", low, high), y)
            y += ROW
    if not marks:
        return _nothing("What it brought", "not evaluated")
    kl = findings.value("evaluate", "kl")
    if kl is not None:
        marks.append(
            element(
                "text",
                f"KL to SFT: {decimal(kl)} nats per response",
                x=0,
                y=y + 2,
                fill=COLOURS["soft"],
            )
        )
        y += ROW
    return element("g", _title("What it brought"), *marks), y - 14


def _bar(row: Estimate, y: int) -> list[Markup]:
    """A value between 0 and 1 as a bar, with its interval as a line over it."""
    left, wide = 98, 110
    marks = [
        element("text", row.name, x=0, y=y),
        element("rect", x=left, y=y - 11, width=wide, height=13, rx=2, fill=COLOURS["track"]),
        element(
            "rect",
            x=left,
            y=y - 11,
            width=wide * min(1.0, max(0.0, row.value)),
            height=13,
            rx=2,
            fill=COLOURS[row.tone],
        ),
        _right(row.shown, PANEL, y),
    ]
    if row.low is not None and row.high is not None:
        middle = y - 4.5
        marks.append(
            element(
                "line",
                x1=left + wide * row.low,
                x2=left + wide * row.high,
                y1=middle,
                y2=middle,
                stroke=COLOURS["ink"],
                stroke_width=2,
            )
        )
    return marks


def _nothing(title: str, why: str) -> tuple[Markup, int]:
    return element("g", _title(title), element("text", why, x=0, y=26, fill=COLOURS["soft"])), 40


def _title(shown: str) -> Markup:
    return element("text", shown, x=0, y=0, font_weight=600)


def _right(shown: str, x: float, y: float, colour: str | None = None) -> Markup:
    return element("text", text(shown), x=x, y=y, text_anchor="end", fill=colour)
