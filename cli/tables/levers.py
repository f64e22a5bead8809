"""The tables of `rlhf levers` and `rlhf scale`."""

from textwrap import wrap

from rich.console import Group
from rich.table import Table
from rich.text import Text

from config.workspace.levers import Levers, Scale, VariantResult
from costs.levers.variants import BASELINE
from reporting.levers_page import levers_sentence
from reporting.numbers import decimal, duration, memory, percent, usd


def levers_view(found: Levers) -> Group:
    """A row per variant, then the conclusions."""
    baseline = next(each for each in found.variants if each.name == BASELINE)
    judge = found.judge.replace("_", " ")
    table = _table("variant", "$", "planned", "time", "memory", judge, "at least", "KL", "cost")
    for each in found.variants:
        if each.state == "done":
            table.add_row(*_row(each, baseline))
    return Group(table, *(Text(line) for line in conclusions(found)))


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(each: VariantResult, baseline: VariantResult) -> list[str]:
    trained = each.measured_usd and baseline.measured_usd
    ratio = f"{each.measured_usd / baseline.measured_usd:.2f}" if trained else ""  # type: ignore[operator]
    worse = "" if each.same_quality else "*"
    return [
        each.name,
        usd(each.measured_usd),
        usd(each.planned_usd),
        duration(each.measured_seconds),
        memory(each.measured_peak_bytes),
        decimal(each.quality),
        f"{decimal(each.difference_low, 2)}{worse}",
        decimal(each.kl, 2),
        ratio,
    ]


def conclusions(found: Levers) -> list[str]:
    """The conclusions, in lines of at most 80 characters."""
    lines = [
        "$, time: of the method alone. cost: over the baseline's. at least: lower end of",
        f"the paired {percent(found.confidence, 0)} interval of the difference to it. "
        f"*: not within {found.margin:g} of it.",
        *wrap(levers_sentence(found), 80),
    ]
    if found.pairs_ranked_right is not None:
        lines += wrap(
            f"The plan ranks {percent(found.pairs_ranked_right, 0)} of {found.pairs} pairs right; "
            f"its choice, {found.chosen}, costs {percent(found.regret, 0)} too much.",
            80,
        )
    for each in found.variants:
        if each.state != "done":
            on = (
                f" (planned {usd(each.planned_usd)} on {each.hardware})" if each.planned_usd else ""
            )
            lines += wrap(f"{each.name}: {each.state}, {each.reason}{on}", 80)
    return [*lines, f"The comparison cost {usd(found.total_usd)}."]


def scale_view(found: Scale) -> Group:
    """A row per factor, with its points."""
    table = _table("factor", "exponent", "interval", "planned", "seconds measured/planned")
    for each in found.factors:
        points = [f"{p.measured_seconds:.2g}/{p.planned_seconds:.2g}" for p in each.points]
        table.add_row(
            each.factor,
            f"{each.exponent:.2f}",
            f"{each.exponent_low:.2f} to {each.exponent_high:.2f}",
            f"{each.planned_exponent:.2f}",
            "  ".join(points),
        )
    title = f"Seconds of the stages' steps on {found.hardware}; {usd(found.total_usd)} in all."
    lines = [title, *wrap(found.answer, 80)]
    return Group(table, *(Text(line) for line in lines))
