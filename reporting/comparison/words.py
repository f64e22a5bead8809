"""Wording of a comparison, shared by the terminal and the page."""

import string

from reporting.comparison.runs import Comparison, Growth, Metric
from reporting.comparison.statistics import CHEAPER, SAME, Estimate, is_clear
from reporting.numbers import ABSENT, decimal, percent, usd


def letter(i: int) -> str:
    """A, B, ... Z, AA, ...: the short name of a run in a comparison."""
    rest, last = divmod(i, 26)
    return (letter(rest - 1) if rest else "") + string.ascii_uppercase[last]


def param(value: object) -> str:
    """A parameter's value in the notation of params.yaml, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def estimate(value: Estimate | None, metric: Metric) -> str:
    """A value with its interval: 92.6% (89.6 to 94.8)."""
    if value is None:
        return ABSENT
    if value.low is None or value.high is None:
        return metric.shown(value.value)
    return f"{metric.shown(value.value)} ({_bare(value.low, metric)} to {_bare(value.high, metric)})"


def difference(value: Estimate | None, metric: Metric) -> str:
    """A difference with its interval, both signed, and whether it is more than chance; of two shares in points: +7.5
    points (+3.5 to +11.5) clear.
    """
    if value is None:
        return ABSENT
    if (value.value, value.low, value.high) == (0, 0, 0):
        return "same"
    unit = " points" if metric.shown is percent else ""
    shown = _signed(value.value, metric) + unit
    if value.low is None or value.high is None:
        return shown
    judged = "clear" if is_clear(value) else "may be chance"
    return f"{shown} ({_signed(value.low, metric)} to {_signed(value.high, metric)}) {judged}"


def interval(value: Estimate | None) -> str:
    """+0.012 to +0.031; the value alone without an interval."""
    if value is None:
        return ""
    if value.low is None or value.high is None:
        return f"{value.value:+.3f}"
    return f"{value.low:+.3f} to {value.high:+.3f}"


def _signed(value: float, metric: Metric) -> str:
    return ("+" if value > 0 else "") + _bare(value, metric)


def _bare(value: float, metric: Metric) -> str:
    return metric.shown(value).removesuffix("%")


def sentence(comparison: Comparison) -> str:
    """The result: the cheapest variant that is as good as the first."""
    base = comparison.variants[0]
    good = [variant for variant in comparison.variants if variant.verdict in SAME]
    costs = {variant.name: variant.measured_usd for variant in good if variant.measured_usd}
    if sum(variant.verdict != "not run" for variant in comparison.variants) < 2 or not (
        base_usd := costs.get(base.name)
    ):
        return "No variant has completed beside the first one."
    best, best_usd = min(costs.items(), key=lambda cost: cost[1])
    times = base_usd / best_usd
    if times < CHEAPER:
        return f"No variant is cheaper than {base.name!r} and shown to be as good."
    return (
        f"{best!r} is as good as {base.name!r} and {times:.1f} times cheaper "
        f"({usd(best_usd)} instead of {usd(base_usd)})."
    )


def remarks(comparison: Comparison) -> list[str]:
    """Notes below the table."""
    lines = []
    if comparison.shared:
        cost = sum(comparison.variants[0].stages.get(stage, 0.0) for stage in comparison.shared)
        lines.append(f"Without what all share: {', '.join(comparison.shared)} ({usd(cost)}).")
    if comparison.pairs_ranked_right is not None and len(comparison.variants) > 2:
        right = round(comparison.pairs_ranked_right * comparison.pairs)
        lines.append(
            f"The plan puts {right} of {comparison.pairs} pairs of clearly different cost in the right order."
        )
    if comparison.regret is not None and comparison.chosen is not None and len(comparison.variants) > 2:
        lines.append(
            f"By the plan {comparison.chosen!r} is the cheapest that is as good"
            + (
                f"; it cost {percent(comparison.regret, 0)} more than {comparison.cheapest!r}."
                if comparison.regret
                else ", and so it was."
            )
        )
    nothing = [
        f"{item.name} {usd(item.taught_nothing_usd)}" for item in comparison.variants if item.taught_nothing_usd
    ]
    if nothing:
        lines.append(f"For replies that taught nothing: {', '.join(nothing)}.")
    lines += [growth(fit) for fit in comparison.growth]
    lines.append(f"As good: the interval of the difference lies above -{comparison.margin:g}.")
    if comparison.judge == "reward":
        lines.append("Reward: how often the run's own reward model prefers its replies to SFT's.")
    if comparison.spent_usd is not None:
        lines.append(f"All runs together cost {usd(comparison.spent_usd)}.")
    return lines


def growth(fit: Growth) -> str:
    """The exponent of a factor, measured and planned."""
    low, high = fit.exponent.low, fit.exponent.high
    within = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return (
        f"Cost grows with {fit.factor}^{decimal(fit.exponent.value)}{within}, planned {decimal(fit.planned_exponent)}."
    )
