"""A plan as one self-contained HTML page: time, money and memory of every stage, phase by phase and role by role."""

from collections.abc import Callable

from markupsafe import Markup

from costs.planning.grades import reasons
from costs.planning.plans import Interval, Plan, StagePlan
from reporting.charts import Part, bar_list, stacked_list, strip
from reporting.numbers import ABSENT, decimal, duration, memory, percent, short, usd
from reporting.parts import (
    badge,
    bullets,
    card,
    details,
    document,
    grid,
    masthead,
    remark,
    section,
    swatch,
    table,
    tiles,
)
from reporting.templating import Child, join

TONES = ("c1", "c2", "c3", "c4", "c5")
PARTS = {
    "weights": "c1",
    "gradients": "c2",
    "optimizer": "c3",
    "activations": "c4",
    "logits": "c5",
    "kv_cache": "second",
    "workspace": "base",
}
"""Part of the memory -> its colour."""


def plan_page(plan: Plan, title: str) -> str:
    """The page."""
    stages = [_stage(stage) for stage in plan.stages]
    content = [_tiles(plan), _overview(plan), *stages, _assumptions(plan)]
    return document(title, _masthead(plan, title), content, ["rlhf plan --json"])


def _masthead(plan: Plan, title: str) -> Markup:
    short_of = [stage for stage in plan.stages if not stage.fits]
    fits = badge("Fits", "good") if not short_of else badge("Does not fit", "bad")
    notes = map(_shortfall, short_of)
    return masthead(title, "plan, made before the run", fits, _sentence(plan), notes=notes)


def _sentence(plan: Plan) -> str:
    total = plan.total
    low, expected, high = (total["usd"][name] for name in ("low", "expected", "high"))
    between = f" ({usd(low)} to {usd(high)} by price)" if low < high else ""
    devices = ", ".join(dict.fromkeys(f"{stage.gpus} × {stage.hardware}" for stage in plan.stages))
    return f"{duration(total['seconds'])} and {usd(expected)}{between} on {devices}."


def _shortfall(stage: StagePlan) -> str:
    fix = f" What helps: {stage.lever}." if stage.lever else " No single lever helps."
    return f"Stage {stage.stage} lacks {memory(stage.shortfall_bytes)} on each device.{fix}"


def _tiles(plan: Plan) -> Markup:
    total = plan.total
    largest = max(plan.stages, key=lambda stage: stage.peak_bytes_per_gpu, default=None)
    shown = [
        ("Time", duration(total["seconds"]), f"one stage after the other, {decimal(total['gpu_hours'])} device-hours"),
        ("Cost", usd(total["usd"]["expected"]), "at the expected price"),
        (
            "Peak memory",
            memory(total["peak_bytes_per_gpu"]),
            f"of one device, in stage {largest.stage}" if largest else "",
        ),
        ("Energy", f"{decimal(total['kwh'])} kWh", "of the devices"),
    ]
    return tiles(shown)


def _overview(plan: Plan) -> Markup:
    parts = [
        Part(stage.stage, stage.seconds, f"{duration(stage.seconds)}, {usd(stage.usd.expected)}", _tone(i))
        for i, stage in enumerate(plan.stages)
    ]
    description = ", ".join(f"{part.name} {part.shown}" for part in parts)
    share = (
        card("Share of each stage", strip(parts, f"Share of each stage in the time: {description}"))
        if sum(part.size for part in parts)
        else None
    )
    header = ["Stage", "Time", "Cost", "Peak memory", "Fits", "Use of the peak rate"]
    rows = [_stage_row(i, stage) for i, stage in enumerate(plan.stages)]
    total = plan.total
    foot = [
        "Total",
        duration(total["seconds"]),
        usd(total["usd"]["expected"]),
        memory(total["peak_bytes_per_gpu"]),
        "",
        "",
    ]
    return section("stages", "Time and cost", None, share, table(header, rows, foot, numbers=range(1, 6)))


def _stage_row(i: int, stage: StagePlan) -> list[Child]:
    return [
        swatch(_tone(i), stage.stage),
        join(duration(stage.seconds), _interval(stage.time_interval, duration)),
        usd(stage.usd.expected),
        join(memory(stage.peak_bytes_per_gpu), _interval(stage.memory_interval, memory)),
        badge("yes", "good") if stage.fits else badge("no", "bad"),
        percent(stage.mfu) if stage.mfu else ABSENT,
    ]


def _interval(interval: Interval, shown: Callable[[float], str]) -> Markup | None:
    """The range of a number, what it rests on, and why."""
    if not interval.high:
        return None
    span = f"{shown(interval.low)} to {shown(interval.high)}"
    return remark(f"{span}, {interval.basis}", interval.why)


def _stage(stage: StagePlan) -> Markup:
    held = f"{memory(stage.peak_bytes_per_gpu)} on each of " if stage.peak_bytes_per_gpu else ""
    lead = f"{duration(stage.seconds)} and {usd(stage.usd.expected)}, {held}{stage.gpus} × {stage.hardware}."
    phases = [
        Part(phase.phase, phase.seconds, f"{duration(phase.seconds)} · {usd(phase.usd)}", "c4")
        for phase in stage.phases
    ]
    times = card("Time of each phase", bar_list(phases, f"Time and cost of each phase of {stage.stage}"))
    return section(stage.stage, stage.stage, lead, grid(times, _memory(stage), kind="halves"), _work(stage))


def _memory(stage: StagePlan) -> Markup | None:
    """Memory of one device at the peak: a bar per role, split into its parts."""
    if not stage.memory:
        return None
    rows = [
        (
            role,
            [Part(part, size, memory(size), PARTS.get(part, "quiet")) for part, size in parts.items()],
            memory(sum(parts.values())),
        )
        for role, parts in stage.memory.items()
    ]
    held = stacked_list(rows, f"Memory of each role at the peak of {stage.stage}")
    return card(
        "Memory of one device at the peak", held, note=f"The peak is in {stage.peak_phase.replace(':', ', ')}."
    )


def _work(stage: StagePlan) -> Markup:
    header = ["Phase", "Time", "Cost", "Operations", "Bytes moved", "Peak memory", "Bound by"]
    rows = [
        [
            phase.phase,
            duration(phase.seconds),
            usd(phase.usd),
            f"{short(phase.flops)} FLOP" if phase.flops else ABSENT,
            memory(phase.bytes_moved),
            memory(phase.peak_bytes),
            phase.bound,
        ]
        for phase in stage.phases
    ]
    return details("What each phase computes and moves", table(header, rows, numbers=range(1, 6)))


def _assumptions(plan: Plan) -> Markup:
    notes = [
        *(f"{why} ({', '.join(stages)})" for why, stages in reasons(plan).items()),
        *plan.assumptions,
        *(f"{stage.stage}: {note}" for stage in plan.stages for note in stage.assumptions),
    ]
    return section("assumptions", "What this is based on", None, bullets(notes))


def _tone(i: int) -> str:
    return TONES[i % len(TONES)]
