"""The key picture of a run: its time by stage and phase, beside what it gained.

A self-contained drawing for pages that show markdown and images. It has its own colours on its own card, so that it
can be read on light and dark pages.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from reporting.charts import Estimate
from reporting.inputs import Findings
from reporting.numbers import decimal, duration, percent, usd
from reporting.templating import environment

WIDTH, PANEL, GAP, MARGIN, ROW = 620, 276, 28, 20, 22
"""In pixels at full size. MLflow has this much room for a description, and does not shrink anything wider."""
COLOURS = {
    "base": "#7d8896",
    "sft": "#3565b0",
    "aligned": "#0b7a6f",
    "ink": "#1b2430",
    "soft": "#5a6675",
    "track": "#eceff3",
    "line": "#e2e5ea",
}
PARTS = ("#64748b", "#3565b0", "#7a54b8", "#0b7a6f", "#b7791f", "#a23b5c", "#4d7c0f", "#0e7490", "#9a3412")
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


LEAST_SHARE = 0.01
"""Smaller parts are merged into one."""


class Spent(NamedTuple):
    """A part of the total time."""

    name: str
    seconds: float
    usd: float
    colour: str


def key_picture(findings: Findings) -> str:
    """The picture as an SVG document; parts that are not known are left out."""
    method = findings.params.align.method
    spent = _strip_panel("Time and cost of each stage", _stages(findings))
    phases = _strip_panel(f"Phases of {method}", _phases(findings))
    placed, height = [], 0
    for i, panels in enumerate(([spent, _quality_panel(findings)], [phases])):
        y = MARGIN + 12
        for panel, tall in panels:
            placed.append(panel | {"x": MARGIN + i * (PANEL + GAP), "y": y})
            y += tall + MARGIN
        height = max(height, y)
    return (
        environment()
        .get_template("key.svg")
        .render(panels=placed, width=WIDTH, height=height, panel_width=PANEL, row=ROW, colours=COLOURS, font=FONT)
    )


def _stages(findings: Findings) -> list[Spent]:
    # a stage has the same colour in every run, so that pictures can be compared
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
    """The parts; if several are small, those are merged into one at the end."""
    total = sum(part.seconds for part in parts)
    small = [part for part in parts if part.seconds < LEAST_SHARE * total]
    if len(small) < 2:
        return list(parts)
    seconds = sum(part.seconds for part in small)
    name = f"{len(small)} others" if seconds else f"{len(small)} reused"
    rest = Spent(name, seconds, sum(part.usd for part in small), COLOURS["base"])
    return [*(part for part in parts if part not in small), rest]


Panel = dict[str, Any]
"""The values that templates/key.svg draws in a panel."""


def _panel(title: str, **content: Any) -> Panel:
    empty = {"absent": "", "cuts": [], "parts": [], "bars": [], "remark": ""}
    return {"title": title, **empty, **content}


def _strip_panel(title: str, parts: Sequence[Spent]) -> tuple[Panel, int]:
    """One bar split in proportion, and a row per part with name, time, cost and share; also its height."""
    total = sum(part.seconds for part in parts)
    if not total:
        absent = "nothing was done: all outputs were reused" if parts else "not recorded"
        return _panel(title, absent=absent), 40
    kept = _folded(parts)
    starts = accumulate((part.seconds for part in kept), initial=0.0)
    cuts = [
        {"x": PANEL * start / total, "width": max(0.0, PANEL * part.seconds / total - 1), "colour": part.colour}
        for start, part in zip(starts, kept, strict=False)
    ]
    rows = [
        {
            "colour": part.colour,
            "name": part.name,
            "time": duration(part.seconds),
            "cost": usd(part.usd),
            "share": percent(part.seconds / total, 0),
        }
        for part in kept
    ]
    return _panel(title, cuts=cuts, parts=rows), 48 + len(kept) * ROW


def _quality_panel(findings: Findings) -> tuple[Panel, int]:
    """Gold scores as bars if there are any, and win rates with their intervals."""
    bars: list[Estimate] = []
    for name, model in (("base", "base"), ("SFT", "sft"), ("aligned", "aligned")):
        gold = findings.value("evaluate", f"gold_{model}")
        if gold is not None:
            bars.append(Estimate(f"gold, {name}", gold, decimal(gold), model))
    for name, kind in (("wins, gold", "gold"), ("wins, reward", "reward")):
        rate, low, high = (findings.value("evaluate", f"win_rate_{kind}{end}") for end in ("", "_low", "_high"))
        if rate is not None:
            both = low is not None and high is not None
            ends = (low, high) if both else (None, None)
            bars.append(Estimate(name, rate, percent(rate), "aligned", *ends))
    title = "What it brought"
    if not bars:
        return _panel(title, absent="not evaluated"), 40
    kl = findings.value("evaluate", "kl")
    remark = f"KL to SFT: {decimal(kl)} nats per response" if kl is not None else ""
    rows = len(bars) + bool(remark)
    return _panel(title, bars=bars, remark=remark), 14 + rows * ROW
