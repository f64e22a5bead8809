"""The tables of `rlhf plan`."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from reporting.numbers import duration, memory, usd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from costs.planning.compare import Difference
    from costs.planning.explain import Explanation, PhaseReason
    from costs.planning.plans import Plan
    from costs.planning.search import StageSearch


def plan_view(plan: "Plan") -> Group:
    """Stages with totals, phases, memory by role, and assumptions."""
    parts: list[object] = [
        stage_table(plan),
        *stage_notes(plan),
        "",
        interval_table(plan),
        *interval_notes(plan),
        "",
        phase_table(plan),
    ]
    if any(stage.memory for stage in plan.stages):
        parts += ["", memory_table(plan)]
    notes = [*plan.assumptions, *(note for stage in plan.stages for note in stage.assumptions)]
    parts += ["", "[bold]based on[/bold]", *(f"  {_plain(note)}" for note in notes)]
    return Group(*parts)  # type: ignore[arg-type]


def interval_table(plan: "Plan") -> Table:
    """The interval of each stage's time and memory, and what they rest on."""
    table = Table(box=None, header_style="bold")
    table.add_column("stage", no_wrap=True)
    for name in ("time may be", "memory may be"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rests on", no_wrap=True)
    for stage in plan.stages:
        time, held = stage.time_interval, stage.memory_interval
        table.add_row(
            stage.stage,
            f"{duration(time.low)} to {duration(time.high)}",
            f"{memory(int(held.low))} to {memory(int(held.high))}" if held.high else "",
            f"{time.basis}, {held.basis}" if held.high and held.basis != time.basis else time.basis,
        )
    return table


def interval_notes(plan: "Plan") -> list[str]:
    """The reason for each."""
    from costs.planning.grades import reasons

    return [f"  {_plain(why)} ({', '.join(stages)})" for why, stages in reasons(plan).items()]


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def stage_table(plan: "Plan") -> Table:
    """One row per stage, totals in the footer. The lowest and highest price have columns if they differ from the
    expected one.
    """
    total = plan.total
    prices = ("low", "expected", "high") if total["usd"]["low"] < total["usd"]["high"] else ("expected",)
    table = Table(box=None, show_footer=True, header_style="bold", footer_style="bold")
    table.add_column("stage", "total", no_wrap=True)
    table.add_column("memory", memory(int(total["peak_bytes_per_gpu"])), justify="right", no_wrap=True)
    table.add_column("fits", "yes" if total["fits"] else "no", min_width=4)
    table.add_column("time", duration(total["seconds"]), justify="right", no_wrap=True)
    for name in prices:
        table.add_column(
            f"{name} $" if len(prices) > 1 else "cost", usd(total["usd"][name]), justify="right", no_wrap=True
        )
    for stage in plan.stages:
        held = memory(int(stage.peak_bytes_per_gpu)) if stage.peak_bytes_per_gpu else "-"
        table.add_row(
            stage.stage,
            held,
            "yes" if stage.fits else "[red]no[/red]",
            duration(stage.seconds),
            *(usd(getattr(stage.usd, name)) for name in prices),
        )
    return table


def stage_notes(plan: "Plan") -> list[str]:
    """Device-hours and energy of the run, and what a stage lacks that does not fit."""
    total = plan.total
    return [
        f"  {total['gpu_hours']:.3g} device-hours, {total['kwh']:.2g} kWh",
        *(
            f"  [red]{stage.stage} lacks {memory(int(stage.shortfall_bytes))} a device: {_plain(stage.lever)}[/red]"
            for stage in plan.stages
            if not stage.fits
        ),
    ]


def phase_table(plan: "Plan") -> Table:
    """Every phase: its share of the stage's time, its bound, its work. Fits 80 columns."""
    table = Table(box=None, header_style="bold")
    for name in ("stage", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "share", "cost", "TFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for stage in plan.stages:
        for phase in stage.phases:
            share = phase.seconds / stage.seconds if stage.seconds else 0.0
            table.add_row(
                stage.stage, phase.phase, duration(phase.seconds), f"{share:.0%}", usd(phase.usd),
                f"{phase.flops / 1e12:,.3g}", phase.bound,
            )  # fmt: skip
    return table


MIB = 2**20
PARTS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "logits": "logits",
    "kv_cache": "cache",
    "workspace": "work",
}


def memory_table(plan: "Plan") -> Table:
    """Role by part at the peak of each stage, in MiB; parts of no role are left out."""
    rows = [((stage.stage, role), sizes) for stage in plan.stages for role, sizes in stage.memory.items()]
    return _parts_table(("stage", "MiB of"), rows)


def _parts_table(heads: tuple[str, ...], rows: "Sequence[tuple[tuple[str, ...], Mapping[str, float]]]") -> Table:
    """Rows of (names under `heads`, part -> bytes)."""
    parts = {part: name for part, name in PARTS.items() if any(size.get(part) for _, size in rows)}
    table = Table(box=None, header_style="bold")
    for name in heads:
        table.add_column(name, no_wrap=True)
    for name in parts.values():
        table.add_column(name, justify="right", no_wrap=True)
    for names, sizes in rows:
        table.add_row(*names, *(_mib(sizes.get(part, 0)) for part in parts))
    return table


def _mib(size: float) -> str:
    return "" if not size else f"{size / MIB:,.3g}" if size < 100 * MIB else f"{size / MIB:,.0f}"


UNITS = {
    "s": lambda value: duration(value) if value >= 0.1 else f"{value * 1e6:,.4g} us",
    "B": lambda value: memory(int(value)),
    "B/s": lambda value: f"{value / 1e9:,.4g} GB/s",
    "FLOP": lambda value: f"{value / 1e12:,.4g} TFLOP",
    "FLOP/s": lambda value: f"{value / 1e12:,.4g} TFLOP/s",
    "operations": lambda value: f"{value:,.4g}",
}
"""Formatters by unit; other values get four digits and the unit."""


def quantity(value: float, unit: str) -> str:
    """A value with its unit, for people."""
    if unit in UNITS:
        return UNITS[unit](value)
    return f"{value:,.4g} {unit}".rstrip()


def explain_view(explained: "Explanation") -> Group:
    """Work asked of the device, and memory."""
    parts: list[object] = [
        f"[bold]{explained.of}[/bold]: {duration(explained.seconds)}, {usd(explained.usd)}, "
        f"{memory(int(explained.peak_bytes))} a device"
    ]
    if len(explained.phases) == 1:
        parts += _phase_lines(explained.phases[0])
    else:
        parts += ["", _reason_table(explained)]
    if explained.memory:
        held = [((role,), sizes) for role, sizes in explained.memory.items()]
        parts += ["", "[bold]in memory at the peak of the stage[/bold]", _parts_table(("MiB of",), held)]
    return Group(*parts)  # type: ignore[arg-type]


def _phase_lines(phase: "PhaseReason") -> list[object]:
    """A phase's resources with their formulas, and the one that bounds it."""
    lines: list[object] = [f"  bound by {phase.bound}"]
    if not phase.resources:
        return lines
    table = Table(box=None, header_style="bold")
    table.add_column("asks one device for", no_wrap=True)
    table.add_column("amount", justify="right", no_wrap=True)
    table.add_column("by itself", justify="right", no_wrap=True)
    table.add_column("counted as")
    for resource in phase.resources:
        table.add_row(
            resource.name, quantity(resource.amount, resource.unit), duration(resource.seconds), resource.formula
        )
    how = (
        "  A pass takes the longer of the device (products or reading weights,\n  attention, traffic) and launching, "
        "on a CPU their sum; then unpacking, host\n  memory, and what computation does not hide of collectives."
    )
    return [*lines, "", table, "", how]


def _reason_table(explained: "Explanation") -> Table:
    """Every phase with its share."""
    table = Table(box=None, header_style="bold")
    for name in ("stage", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "share", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for phase in explained.phases:
        share = phase.seconds / explained.seconds if explained.seconds else 0.0
        table.add_row(phase.stage, phase.phase, duration(phase.seconds), f"{share:.0%}", usd(phase.usd), phase.bound)
    return table


def difference_table(rows: list["Difference"]) -> Table:
    """Before, after and change of every stage."""
    from costs.planning.compare import change, verdict

    table = Table("stage", box=None, header_style="bold")
    for name in ("before", "after", "cost", "time", "memory"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for row in rows:
        table.add_row(
            row.stage,
            usd(row.usd[0]),
            usd(row.usd[1]),
            change(row.usd),
            change(row.seconds),
            change(row.peak_bytes),
            verdict(row.fits),
        )
    return table


def search_view(by_stage: dict[str, "StageSearch"]) -> Group:
    """What the search changed in each stage, and why."""
    lines: list[object] = []
    for stage, result in by_stage.items():
        first, best = result.start, result.best
        lines += [
            f"[bold]{stage}[/bold], {result.tried} combinations: {usd(first.usd)} -> {usd(best.usd)}, "
            f"{duration(first.seconds)} -> {duration(best.seconds)}",
            f"  {memory(int(first.device_bytes))} -> {memory(int(best.device_bytes))} a device",
        ]
        for choice in result.choices:
            lines += [f"  {choice.key}: {_value(choice.before)} -> {_value(choice.after)}", f"    {choice.reason}"]
        if not result.choices:
            lines.append("  nothing to change")
    return Group(*lines)  # type: ignore[arg-type]


def _value(value: object) -> str:
    """A setting as in params.yaml; an adapter by its rank and modules."""
    if isinstance(value, dict):
        return f"rank {value['rank']} on {', '.join(value['modules'])}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
