"""What rlhf bench could have measured."""

from config.workspace.benchmarked import Benchmark, Limits, Load, Percentiles, Usage
from serving.bench.measured import knee_of


def benchmark(weights: str, rates: dict[int, float]) -> Benchmark:
    """Loads of 10 s whose TPOT doubles at 4."""
    loads = tuple(
        Load(
            concurrency=item, requests_per_second=None, seconds=10.0, requests=50, failed=0,
            fault=None, replies_per_second=5.0, goodput_per_second=5.0, tokens_per_second=rate,
            input_tokens_per_second=200.0,
            ttft_ms=Percentiles(p50=10, p95=12, p99=13),
            tpot_ms=Percentiles(p50=item, p95=item, p99=item),
            usage=Usage(
                wall_seconds=10, busy_seconds=10, input_tokens=2000, output_tokens=10 * rate
            ),
        )
        for item, rate in rates.items()
    )  # fmt: skip
    return Benchmark(
        engine="llama_cpp", weights=weights, slots=16, time="2026-11-24T12:00:00+00:00",
        usd_per_hour=3.6, limits=Limits(), loads=loads, knee=knee_of(loads),
    )  # fmt: skip
