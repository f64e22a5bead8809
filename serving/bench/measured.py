"""Results of a load test: rates and latencies of each load, and the knee."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from config.workspace.benchmarked import Knee, Limits, Load, Percentiles, Usage


@dataclass(frozen=True)
class Reply:
    """One request of a load, times in seconds."""

    sent: float
    """Seconds on a clock shared by all replies."""
    ttft_seconds: float
    seconds: float
    """Time of the last token."""
    input_tokens: int
    output_tokens: int
    fault: str | None = None
    """Reason of the failure."""

    @property
    def tpot_seconds(self) -> float | None:
        """Seconds per output token after the first; None for a reply of one token."""
        if self.output_tokens < 2:
            return None
        return (self.seconds - self.ttft_seconds) / (self.output_tokens - 1)

    def share_between(self, begin: float, end: float) -> float:
        """The part of its time within an interval."""
        last = self.sent + self.seconds
        if self.seconds <= 0:
            return float(begin <= self.sent < end)
        return max(0.0, min(last, end) - max(self.sent, begin)) / self.seconds


def holds(limits: Limits, reply: Reply) -> bool:
    """Whether a reply meets the limits."""
    tpot = reply.tpot_seconds or 0.0
    return 1000 * reply.ttft_seconds <= limits.ttft_ms and 1000 * tpot <= limits.tpot_ms


def measured_load(
    replies: Sequence[Reply],
    begin: float,
    end: float,
    limits: Limits,
    concurrency: int | None = None,
    requests_per_second: float | None = None,
) -> Load:
    """Statistics of the interval from `begin` to `end`. A reply counts by the share of it within the interval."""
    good = [reply for reply in replies if reply.fault is None]
    faults = [reply.fault for reply in replies if reply.fault is not None]
    seconds = end - begin
    tpots = [reply.tpot_seconds for reply in good if reply.tpot_seconds is not None]
    shared = [(reply.share_between(begin, end), reply) for reply in good]
    usage = Usage(
        wall_seconds=seconds,
        busy_seconds=covered([(reply.sent, reply.sent + reply.seconds) for reply in good], begin, end),
        input_tokens=sum(share * reply.input_tokens for share, reply in shared),
        output_tokens=sum(share * reply.output_tokens for share, reply in shared),
        prefill_seconds=sum(share * reply.ttft_seconds for share, reply in shared),
        decode_seconds=sum(share * (reply.seconds - reply.ttft_seconds) for share, reply in shared),
    )
    return Load(
        concurrency=concurrency,
        requests_per_second=requests_per_second,
        seconds=seconds,
        requests=len(replies),
        failed=len(faults),
        fault=faults[0] if faults else None,
        replies_per_second=sum(share for share, _ in shared) / seconds,
        goodput_per_second=sum(share for share, reply in shared if holds(limits, reply)) / seconds,
        tokens_per_second=usage.output_tokens / seconds,
        input_tokens_per_second=usage.input_tokens / seconds,
        ttft_ms=percentiles([reply.ttft_seconds for reply in good]),
        tpot_ms=percentiles(tpots),
        usage=usage,
    )


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of an interval covered by at least one span."""
    total, at = 0.0, begin
    for first, last in sorted(spans):
        total += max(0.0, min(last, end) - max(first, at))
        at = max(at, min(last, end))
    return total


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    milliseconds = [1000 * value for value in seconds]
    several = milliseconds * 2 if len(seconds) == 1 else milliseconds
    cuts = quantiles(several, n=100, method="inclusive")
    return Percentiles(**{f"p{p}": cuts[p - 1] for p in (50, 95, 99)})


def knee_of(loads: Sequence[Load]) -> Knee | None:
    """The knee of closed loops ordered by concurrency; None if none has latencies."""
    closed = sorted(
        (load for load in loads if load.concurrency is not None and load.tpot_ms is not None),
        key=lambda load: load.concurrency or 0,
    )
    if not closed:
        return None
    most = 2 * (closed[0].tpot_ms.p95 if closed[0].tpot_ms else 0.0)
    before = closed[0]
    for load in closed:
        if load.tpot_ms is not None and load.tpot_ms.p95 > most:
            return Knee(concurrency=before.concurrency or 1, doubles_at=load.concurrency)
        before = load
    return Knee(concurrency=before.concurrency or 1, doubles_at=None)
