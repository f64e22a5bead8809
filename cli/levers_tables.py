"""The tables of `rlhf levers` and `rlhf scale`."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from config.workspace.levers import Levers, Scale, VariantResult
from costs.levers.variants import BASELINE
from reporting.numbers import decimal, duration, memory, percent, usd


def levers_view(found: Levers) -> Group:
    """A row per variant, then what the comparison says."""
    baseline = next(each for each in found.variants if each.name == BASELINE)
    table = Table(box=None, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for name in (
        "$",
        "plan",
        "time",
        "memory",
        found.judge.replace("_", " "),
        "±",
        "KL",
        "$ ratio",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.variants:
        table.add_row(*_row(each, baseline))
    return Group(table, *(Text(line) for line in conclusions(found)))


def _row(each: VariantResult, baseline: VariantResult) -> list[str]:
    if each.state != "done":
        return [each.name, each.state, usd(each.planned_usd)]
    half = ((each.quality_high or 0) - (each.quality_low or 0)) / 2
    ratio = (
        f"{each.measured_usd / baseline.measured_usd:.2f}{'' if each.same_quality else ' (worse)'}"
        if each.measured_usd and baseline.measured_usd
        else "-"
    )
    return [
        each.name,
        usd(each.measured_usd),
        usd(each.planned_usd),
        duration(each.measured_seconds),
        memory(each.measured_peak_bytes),
        decimal(each.quality),
        decimal(half, 2),
        decimal(each.kl),
        ratio,
    ]


def conclusions(found: Levers) -> list[str]:
    """What the numbers come to, in lines of at most 80 characters."""
    lines = [f"Same quality: at most {found.margin:g} below the baseline, "
             f"by the paired {percent(found.confidence, 0)} interval."]  # fmt: skip
    if found.best is not None:
        best = next(each for each in found.variants if each.name == found.best)
        base = next(each for each in found.variants if each.name == BASELINE)
        if best.measured_usd and base.measured_usd and best.name != BASELINE:
            times = base.measured_usd / best.measured_usd
            lines.append(f"{best.name}: same quality, {times:.1f} times cheaper.")
    if found.pairs_ranked_right is not None:
        lines.append(
            f"The plan ranks {percent(found.pairs_ranked_right, 0)} of {found.pairs} pairs right; "
            f"its choice, {found.chosen}, costs {percent(found.regret, 0)} too much."
        )
    lines += [f"{each.name}: {each.state}, {each.reason}" for each in found.variants
              if each.state != "done"]  # fmt: skip
    lines.append(f"The comparison cost {usd(found.total_usd)}.")
    return lines


def scale_view(found: Scale) -> Group:
    """A row per factor, then the points of each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("factor", no_wrap=True)
    for name in ("exponent", "interval", "planned"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("seconds measured / planned", no_wrap=True)
    for each in found.factors:
        points = "  ".join(
            f"{point.measured_seconds:.2g}/{point.planned_seconds:.2g}" for point in each.points
        )
        table.add_row(
            each.factor,
            f"{each.exponent:.2f}",
            f"{each.exponent_low:.2f} to {each.exponent_high:.2f}",
            f"{each.planned_exponent:.2f}",
            points,
        )
    lines = [f"Seconds of the stages' steps on {found.hardware}; {usd(found.total_usd)} in all."]
    return Group(table, *(Text(line) for line in (*lines, found.answer) if line))
