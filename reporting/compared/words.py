"""Wording of a comparison, shared by the terminal and the page."""

import string
from collections.abc import Mapping
from typing import Any

from costs.ledger.cost_change import PHASES, PRICE, RATE, SECONDS, TOKENS, CostChange
from reporting.compared.side_by_side import SAME, Estimate, Metric, SideBySide, is_clear
from reporting.numbers import ABSENT, count, decimal, percent, usd
from reporting.row_digests import Change

WORTH_SHOWING = 0.05
"""A reason is shown if its share is at least this fraction of the largest one."""
NEGLIGIBLE_USD = 5e-8
"""Shares below this are rounding, and not shown."""


def letter(i: int) -> str:
    """A, B, ... Z, AA, ...: the short name of a run in a comparison."""
    return (
        letter(i // 26 - 1) + string.ascii_uppercase[i % 26]
        if i >= 26
        else string.ascii_uppercase[i]
    )


def signed_usd(value: float) -> str:
    """A difference in cost with its sign; below a millionth of a dollar it is "about nothing"."""
    if 0 < abs(value) < 1e-6:
        return "≈$0"
    return usd(value) if value <= 0 else f"+{usd(value)}"


def param(value: Any) -> str:
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
    return (
        f"{metric.shown(value.value)} ({_bare(value.low, metric)} to {_bare(value.high, metric)})"
    )


def difference(value: Estimate | None, metric: Metric) -> str:
    """A difference with its interval, both signed; of two shares in points: +7.5 points (+3.5 to
    +11.5).
    """
    if value is None:
        return ABSENT
    if value == SAME:
        return "same"
    unit = " points" if metric.shown is percent else ""
    parts = [("+" if part > 0 else "") + _bare(part, metric) for part in value if part is not None]
    return parts[0] + unit + (f" ({parts[1]} to {parts[2]})" if len(parts) == 3 else "")


def _bare(value: float, metric: Metric) -> str:
    return metric.shown(value).removesuffix("%")


def judged(value: Estimate | None) -> str:
    """Whether a difference is more than chance, where an interval is known."""
    return (
        "" if value == SAME else {True: "clear", False: "may be chance", None: ""}[is_clear(value)]
    )


def hacking(found: SideBySide) -> list[str] | None:
    """Whether each run's reward was hacked; None if no run has that verdict."""
    verdicts = [
        side.findings.metrics["evaluate"].get("reward_hacking", ABSENT) for side in found.sides
    ]
    words = [
        {True: "yes", False: "no", None: "not decided"}.get(value, ABSENT) for value in verdicts
    ]
    return words if set(words) != {ABSENT} else None


def rows_changed(change: Change | None) -> str:
    """+120 −3 rows."""
    if change is None:
        return "not known"
    return f"+{count(change.added)} −{count(change.removed)}" if any(change) else "same rows"


def why(change: CostChange, name_before: str, name_after: str) -> str:
    """The reasons for a difference in cost, largest first, without those that are negligible."""
    if not change.reasons:
        return ""
    if set(change.reasons) == {PHASES}:
        return f"only in {name_after if change.after else name_before}"
    largest = max(abs(share) for share in change.reasons.values())
    ranked = sorted(change.reasons.items(), key=lambda item: -abs(item[1]))
    kept = [
        (reason, share)
        for reason, share in ranked
        if abs(share) >= max(WORTH_SHOWING * largest, NEGLIGIBLE_USD)
    ]
    if len(kept) == 1:
        return _reason(kept[0][0], change)
    return ", ".join(f"{_reason(reason, change)} {signed_usd(share)}" for reason, share in kept)


def _reason(reason: str, change: CostChange) -> str:
    """`2.1x tokens`, `0.8x tokens/s`, `10x price`: after relative to before, if there is one number
    for it.
    """
    if reason == PHASES:
        return "phases of one only"
    before, after = change.before, change.after
    pairs: Mapping[str, tuple[float | None, float | None]] = {
        TOKENS: (before and before.tokens, after and after.tokens),
        RATE: (before and before.tokens_per_second, after and after.tokens_per_second),
        SECONDS: (before and before.device_seconds, after and after.device_seconds),
        PRICE: (before and before.usd_per_device_hour, after and after.usd_per_device_hour),
    }
    name = {TOKENS: "tokens", RATE: "tokens/s", SECONDS: "time", PRICE: "price"}[reason]
    old, new = pairs[reason]
    if not change.phase and reason in (TOKENS, RATE, SECONDS):
        return name  # a stage's tokens are of several kinds: their sum would explain nothing
    return f"{decimal(new / old, 2)}× {name}" if old and new else name
