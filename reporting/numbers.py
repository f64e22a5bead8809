"""Formats numbers for people. The project uses base units and fractions internally; GiB, minutes and percent are for
printing only.
"""

import math
from datetime import UTC, datetime

ABSENT = "–"
"""Printed in place of a missing number."""


def usd(value: float | None) -> str:
    """US dollars with as many decimals as two significant digits need: $12.30, $0.087, $0.00012; below that,
    <$0.000001.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "$0"
    if 0 < value < 1e-6:
        return "<$0.000001"
    decimals = 2 if abs(value) >= 1 else min(12, 1 - math.floor(math.log10(abs(value))))
    return f"{'−' if value < 0 else ''}${abs(value):,.{max(2, decimals)}f}"


def duration(seconds: float | None) -> str:
    """12 ms, 0.4 s, 12 s, 5 min 12 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds == 0:
        return "0 s"
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.{0 if seconds >= 0.001 else 1}f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if rounded >= size:
            rest = rounded % size // lower_size
            return f"{rounded // size} {unit} {rest} {lower}" if rest else f"{rounded // size} {unit}"
    return f"{rounded} s"


def memory(size_bytes: float | None) -> str:
    """Bytes in KiB, MiB, GiB or TiB."""
    if not size_bytes or not math.isfinite(size_bytes):
        return ABSENT
    unit = min(4, max(1, int(math.log2(abs(size_bytes)) // 10)))
    value = size_bytes / 1024**unit
    return f"{value:,.{0 if value >= 100 else 1}f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def count(value: float | None) -> str:
    """A whole number with thousands separators; from ten million on, shortened: 12.3 M."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if abs(value) < 1e7:
        return f"{round(value):,}"
    return short(value)


def short(value: float) -> str:
    """Format with three digits and a suffix for a power of 1000: 460 k, 1.24 M, 7.00 B, up to E (10 to the 18th)."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{max(0, 2 - int(math.log10(abs(value) / size)))}f} {unit}"
    return f"{value:.0f}"


def percent(fraction: float | None, decimals: int = 1) -> str:
    """A fraction in percent."""
    return (
        ABSENT
        if fraction is None or not math.isfinite(fraction)
        else f"{100 * fraction:.{decimals}f}%".replace("-", "−")
    )


def deviation(fraction: float | None) -> str:
    """A relative error with its sign: +12%, −3.1%."""
    if fraction is None or not math.isfinite(fraction):
        return ABSENT
    return f"{100 * fraction:+.{0 if abs(fraction) >= 0.0995 else 1}f}%".replace("-", "−")


def decimal(value: float | None, digits: int = 3) -> str:
    """A plain number with `digits` significant digits; from 0.01 on with at most `digits` decimals."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    decimals = digits - 1 - magnitude
    return f"{value:,.{max(0, min(decimals, digits) if magnitude >= -2 else decimals)}f}".replace("-", "−")


def moment(seconds_since_epoch: float | None) -> str:
    """A time in UTC, to the minute."""
    return (
        ABSENT
        if seconds_since_epoch is None
        else datetime.fromtimestamp(seconds_since_epoch, UTC).strftime("%Y-%m-%d %H:%M UTC")
    )
