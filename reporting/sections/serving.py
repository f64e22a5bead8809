"""Serving: speed under load, the price of a million tokens, and when a cheaper way to serve has paid for itself."""

from collections.abc import Callable
from itertools import cycle

from markupsafe import Markup

from config.workspace.benchmarked import Benchmark, Load
from costs.formulas.serving import payback_tokens, price_of
from reporting.charts import Series, legend, line_chart
from reporting.inputs import Findings
from reporting.numbers import count, short, usd
from reporting.parts import card, grid, section, table

TITLE = "Served"
TONES = ("accent", "second", "sft", "quiet", "base")
BASELINE = "f32"
Value = Callable[[Benchmark, Load], float | None]


def serving_section(findings: Findings) -> Markup | None:
    """Nothing for a model that was not benchmarked."""
    benchmarks = sorted(findings.benchmarks, key=lambda benchmark: benchmark.variant)
    if not benchmarks:
        return None
    knees = [(benchmark, load) for benchmark in benchmarks if (load := benchmark.at_knee()) is not None]
    note = (
        "At the knee: the highest load before p95 TPOT is twice that of the lowest. Dollars per "
        "million tokens: idle time included (allocation); input and output split by the seconds "
        "they take. Paid back: tokens to serve until the difference to the first row, or of a "
        "student to the aligned model, has paid for making this one."
    )
    header = ["", "At the knee", "Tokens/s", "TTFT p95", "TPOT p95", "$ per M", "$ input", "$ output"]
    numbers = table([*header, "Paid back"], [_row(findings, *benchmark) for benchmark in knees])
    return section(
        "served",
        TITLE,
        _lead(findings, knees),
        card("At the knee of each", numbers, note=note),
        grid(
            _curves("Tokens per second", benchmarks, lambda _, load: load.tokens_per_second),
            _curves(
                "Dollars per million tokens", benchmarks, lambda benchmark, load: price_of(benchmark, load).blended
            ),
            kind="halves",
        ),
    )


def _lead(findings: Findings, knees: list[tuple[Benchmark, Load]]) -> str:
    training_usd, served = findings.ledger.made_usd, findings.served
    prices = [price for benchmark, load in knees if (price := price_of(benchmark, load).blended)]
    so_far = (
        f"{short(served.tokens)} tokens were served so far, for {usd(served.usd)}; training came "
        f"to {usd(1e6 * training_usd / served.tokens)} per million of them."
        if served.tokens
        else "rlhf serve has not served anything yet."
    )
    if not prices or not training_usd:
        return so_far
    return (
        f"{so_far} Training ({usd(training_usd)}) costs as much as serving "
        f"{short(1e6 * training_usd / min(prices))} tokens."
    )


def _row(findings: Findings, benchmark: Benchmark, load: Load) -> list[str]:
    price = price_of(benchmark, load)
    return [
        _name(benchmark),
        f"{load.concurrency} concurrent",
        count(load.tokens_per_second),
        _ms(load.ttft_ms.p95 if load.ttft_ms else None),
        _ms(load.tpot_ms.p95 if load.tpot_ms else None),
        usd(price.blended),
        usd(price.input),
        usd(price.output),
        _paid_back(findings, benchmark, price.blended),
    ]


def _paid_back(findings: Findings, benchmark: Benchmark, price: float | None) -> str:
    """Cost of making the model: none for a quantised file beyond the export, which makes all of them; for a student
    that of its stage.
    """
    distilled = findings.ledger.stage("distill")
    if findings.teacher_benchmarks and distilled is not None:
        extra, others = distilled.usd, findings.teacher_benchmarks
    else:
        extra, others = 0.0, findings.benchmarks
    baseline = next((other for other in others if other.weights == BASELINE), None)
    at = baseline.at_knee() if baseline else None
    if baseline is None or at is None or price is None or baseline is benchmark:
        return ""
    before = price_of(baseline, at).blended
    tokens = None if before is None else payback_tokens(extra, before, price)
    if tokens is None:
        return "never: it is no cheaper"
    return f"{short(tokens)} tokens" if tokens else "at once"


def _curves(title: str, benchmarks: list[Benchmark], value: Value) -> Markup:
    """A card with a curve by concurrency for each way to serve."""
    series = [
        Series(
            _name(benchmark),
            [
                (float(load.concurrency), measured)
                for load in benchmark.loads
                if load.concurrency is not None and (measured := value(benchmark, load)) is not None
            ],
            tone,
        )
        for benchmark, tone in zip(benchmarks, cycle(TONES), strict=False)
    ]
    with_points = [line for line in series if line.points]
    chart = line_chart(with_points, f"{title} by concurrent requests", "concurrent requests")
    return card(title, legend(with_points) if len(with_points) > 1 else None, chart)


def _name(benchmark: Benchmark) -> str:
    return f"{benchmark.engine} {benchmark.weights}, {benchmark.slots} slots" if benchmark.slots else benchmark.engine


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


def served_summary(findings: Findings) -> tuple[str, str] | None:
    """Price and figure of the cheapest way that was measured, for the run's summary."""
    priced = [
        (price, load)
        for benchmark in findings.benchmarks
        if (load := benchmark.at_knee()) is not None and (price := price_of(benchmark, load).blended)
    ]
    if not priced:
        return None
    price, load = min(priced, key=lambda benchmark: benchmark[0])
    tpot = f", p95 TPOT {_ms(load.tpot_ms.p95)}" if load.tpot_ms else ""
    return f"{usd(price)} per M tokens", f"{count(load.tokens_per_second)} tokens/s{tpot}"
