"""Results of `rlhf bench`, kept with the run whose model was measured. The report, MLflow and later benchmarks read
them.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from config.atomic_file import write_atomically
from config.records import kept_folder

FILE = "benchmarked.json"


class Measured(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Usage(Measured):
    """Work of a server during an interval."""

    wall_seconds: float
    busy_seconds: float
    """Seconds with at least one running request."""
    input_tokens: float
    output_tokens: float
    prefill_seconds: float = 0.0
    """Sum over all requests of the time to the first token. 0, as `decode_seconds`: not timed."""
    decode_seconds: float = 0.0


class Percentiles(Measured):
    """Percentiles of a latency, in milliseconds."""

    p50: float
    p95: float
    p99: float


class Load(Measured):
    """One load. Rates are over the time it was kept up, latencies over all its replies."""

    concurrency: int | None
    """Constant number of concurrent requests; None for an arrival rate."""
    requests_per_second: float | None
    """Arrival rate; None for a constant concurrency."""
    seconds: float
    requests: int
    failed: int
    fault: str | None
    """Reason of the first failure."""
    replies_per_second: float
    goodput_per_second: float
    """Replies within the limits, per second."""
    tokens_per_second: float
    """Output tokens."""
    input_tokens_per_second: float
    ttft_ms: Percentiles | None
    """Time to the first token; None if every request failed."""
    tpot_ms: Percentiles | None
    """Time per output token after the first; None if no reply had two tokens."""
    usage: Usage
    """Usage by the load, from which its price follows."""


class Knee(Measured):
    """The load beyond which throughput is no longer worth its latency."""

    concurrency: int
    """The highest concurrency before p95 TPOT is twice that of the lowest load."""
    doubles_at: int | None
    """The first concurrency with twice that TPOT; None if none was measured."""


class Limits(Measured):
    """Limits that a reply must meet to count towards goodput."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0


class Benchmark(Measured):
    """The loads of one way to serve a model."""

    engine: str
    weights: str
    slots: int
    time: str
    """Time of the measurement, ISO 8601."""
    usd_per_hour: float
    limits: Limits
    loads: tuple[Load, ...]
    knee: Knee | None
    peak_bytes: int | None = None
    """Resident memory of front and engine; None where they run elsewhere."""

    @property
    def variant(self) -> tuple[str, str, int]:
        return self.engine, self.weights, self.slots

    def at_knee(self) -> Load | None:
        """The load that a price is quoted for."""
        if self.knee is None:
            return None
        wanted = self.knee.concurrency
        return next((load for load in self.loads if load.concurrency == wanted), None)


class Benchmarked(Measured):
    """All benchmarks of one model, the newest of each way to serve it."""

    model_digest: str
    """DVC's digest of the model."""
    benchmarks: tuple[Benchmark, ...]


def keep_benchmark(root: Path, run_id: str, model_digest: str, benchmark: Benchmark, is_whole: bool = True) -> None:
    """Keep a benchmark with the run that made the model. It replaces an earlier one of the same variant if it is
    complete; those of another model are dropped.
    """
    before = read_benchmarked(root, run_id)
    kept = before.benchmarks if before and before.model_digest == model_digest else ()
    if not is_whole and any(other.variant == benchmark.variant for other in kept):
        return
    others = tuple(other for other in kept if other.variant != benchmark.variant)
    benchmarked = Benchmarked(model_digest=model_digest, benchmarks=(*others, benchmark))
    write_atomically(kept_folder(root, run_id) / FILE, benchmarked.model_dump_json(indent=1))


def read_benchmarked(root: Path, run_id: str) -> Benchmarked | None:
    """The benchmarks of a run's model; None without any, or if the file is damaged."""
    try:
        return Benchmarked.model_validate_json((kept_folder(root, run_id) / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
