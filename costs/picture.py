"""The breakdown as one self-contained HTML page: memory by role and part, time by phase. SVG drawn here, no external request."""

from collections.abc import Mapping, Sequence
from html import escape

from costs.compare import money
from costs.plans import Plan, StagePlan

COLOURS = {
    "weights": "#4269d0", "gradients": "#efb118", "optimizer": "#ff725c", "activations": "#6cc5b0",
    "logits": "#3ca951", "kv_cache": "#a463f2", "workspace": "#9498a0",
}  # fmt: skip
PHASE_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH, ROW = 720, 26
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1e23}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{display:block;margin:.3rem 0}svg text{font:12px system-ui,sans-serif;fill:#1b1e23}.no{color:#b3261e;font-weight:600}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}svg text{fill:#e6e6e6}}"
)


def page(plan: Plan, title: str) -> str:
    """The whole page."""
    total = plan.total
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>{hours(total['seconds'])}, "
        f"{money(total['usd']['low'])} / <b>{money(total['usd']['expected'])}</b> / {money(total['usd']['high'])}, "
        f"{total['kwh']:.3g} kWh.</p>"
    )
    return head + legend() + "".join(_stage(stage) for stage in plan.stages) + _assumptions(plan) + "</html>\n"


def legend() -> str:
    keys = "".join(
        f"<span style='display:inline-block;width:.8em;height:.8em;background:{colour}'></span> {name} &nbsp; "
        for name, colour in COLOURS.items()
    )
    return f"<p>Memory: {keys}</p>"


def _stage(stage: StagePlan) -> str:
    verdict = (
        "fits" if stage.fits else f"<span class=no>lacks {stage.shortfall_bytes / 2**30:.2f} GiB a device: {escape(stage.lever)}</span>"
    )
    rows = {role: dict(parts) for role, parts in stage.memory.items()}
    memory = f"<h3>Memory of one device at the peak ({escape(stage.peak_phase)})</h3>{memory_bars(rows)}" if rows else ""
    table = "".join(
        f"<tr><td>{escape(p.phase)}<td>{hours(p.seconds)}<td>{money(p.usd)}<td>{p.flops:.3g}<td>{p.bytes_moved:.3g}<td>{p.bound}"
        for p in stage.phases
    )
    return (
        f"<h2>{escape(stage.stage)}</h2><p>{hours(stage.seconds)}, {money(stage.usd.expected)}, "
        f"{stage.peak_bytes_per_gpu / 2**30:.2f} GiB, {verdict}.</p>{memory}"
        f"<h3>Time by phase</h3>{time_bar(stage)}<table><tr><th>phase<th>time<th>cost<th>FLOP<th>bytes<th>bound by{table}</table>"
    )


def memory_bars(roles: Mapping[str, Mapping[str, float]]) -> str:
    """One bar a role, its parts side by side, all to one scale."""
    widest = max((sum(parts.values()) for parts in roles.values()), default=0.0) or 1.0
    drawn = []
    for row, (role, parts) in enumerate(roles.items()):
        drawn.append(f"<text x=0 y={row * ROW + 17}>{escape(role)}</text>")
        x = 80.0
        for part, size in parts.items():
            width = size / widest * (WIDTH - 190)
            drawn.append(
                f"<rect x={x:.1f} y={row * ROW + 4} width={width:.1f} height={ROW - 8} fill='{COLOURS[part]}'>"
                f"<title>{part}: {size / 2**30:.3f} GiB</title></rect>"
            )
            x += width
        drawn.append(f"<text x={x + 6:.1f} y={row * ROW + 17}>{sum(parts.values()) / 2**30:.3g} GiB</text>")
    return f"<svg width={WIDTH} height={ROW * len(roles) + 4} role=img aria-label='memory by role and part'>{''.join(drawn)}</svg>"


def time_bar(stage: StagePlan) -> str:
    """One bar, its phases side by side."""
    drawn, x = [], 0.0
    for index, phase in enumerate(stage.phases):
        width = phase.seconds / stage.seconds * WIDTH if stage.seconds else 0.0
        colour = PHASE_COLOURS[index % len(PHASE_COLOURS)]
        drawn.append(
            f"<rect x={x:.1f} y=4 width={width:.1f} height={ROW - 8} fill='{colour}'>"
            f"<title>{escape(phase.phase)}: {hours(phase.seconds)}</title></rect>"
        )
        if width > 60:
            drawn.append(f"<text x={x + 4:.1f} y=17>{escape(phase.phase)}</text>")
        x += width
    return f"<svg width={WIDTH} height={ROW} role=img aria-label='time by phase'>{''.join(drawn)}</svg>"


def _assumptions(plan: Plan) -> str:
    notes: Sequence[str] = [*plan.assumptions, *(note for stage in plan.stages for note in stage.assumptions)]
    return "<h2>What this stands on</h2><ul>" + "".join(f"<li>{escape(note)}" for note in notes) + "</ul>"


def hours(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
