"""The tables of `rlhf bench` and of `rlhf plan serve`."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from config.workspace.benchmarked import Benchmark, Load
from costs.formulas.serving import BASES, price_of
from costs.planning.serving import ServingPlan


def bench_view(benchmark: Benchmark, model: str, plan: ServingPlan | None) -> Group:
    """The loads beside their plan, and what a million tokens cost at the knee."""
    planned = {load.concurrency: load for load in plan.loads} if plan else {}
    served = f"{benchmark.engine} {benchmark.weights}".strip()
    table = Table(title=f"{model}, {served}", title_justify="left", box=None, pad_edge=False)
    latencies = ("TTFT p50", "p95", "TPOT p50", "p95")
    for name in ("clients", "tok/s", "plan", "goodput", *latencies, "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("$ per M", justify="right", no_wrap=True)
    for load in benchmark.loads:
        price = price_of(benchmark, load)
        table.add_row(
            load_name(load),
            f"{load.tokens_per_second:.0f}",
            f"{at.tokens_per_second:.0f}" if (at := planned.get(load.concurrency or 0)) else "-",
            f"{load.goodput_per_second:.1f}/s",
            *(_ms(load.ttft_ms, p) for p in ("p50", "p95")),
            *(_ms(load.tpot_ms, p) for p in ("p50", "p95")),
            str(load.failed),
            usd(price.blended),
        )
    return Group(table, *(Text(line) for line in notes(benchmark, plan)))


def notes(benchmark: Benchmark, plan: ServingPlan | None) -> list[str]:
    """What the table leaves out, in lines of at most 80 characters."""
    lines = [
        f"Times in ms. Goodput: TTFT up to {benchmark.limits.ttft_ms:g} ms and TPOT up to "
        f"{benchmark.limits.tpot_ms:g} ms."
    ]
    if plan is not None and benchmark.peak_bytes is not None:
        lines.append(f"Memory: {benchmark.peak_bytes / 2**20:.0f} MiB, planned {plan.peak_bytes / 2**20:.0f}.")
    if plan is not None:
        lines.append("Plan: a roofline of decoding, without front and network.")
    at = benchmark.at_knee()
    if at is None or benchmark.knee is None:
        return lines
    until = (
        f"p95 TPOT has doubled at {benchmark.knee.doubles_at}"
        if benchmark.knee.doubles_at
        else "p95 TPOT does not double up to there"
    )
    lines.append(f"Knee: concurrency {benchmark.knee.concurrency}; {until}.")
    for basis in BASES:
        price = price_of(benchmark, at, basis)
        lines.append(
            f"{basis.capitalize():<11} {usd(price.input)} per million input tokens, {usd(price.output)} output."
        )
    lines.append(f"At ${benchmark.usd_per_hour:g} an hour for the server.")
    return lines


def load_name(load: Load) -> str:
    """The concurrency, or the arrival rate."""
    if load.concurrency is not None:
        return str(load.concurrency)
    return f"{load.requests_per_second:g}/s"


def usd(value: float | None) -> str:
    """A price with three significant digits, never in powers of ten."""
    if value is None:
        return "-"
    return f"${value:.2f}" if value >= 1 else f"${value:.4f}"


def _ms(seconds: object, name: str) -> str:
    value = getattr(seconds, name, None)
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def plan_view(plan: ServingPlan) -> Group:
    """Memory, the rates of rising loads, and the devices for a rate of requests."""
    title = f"serve: {plan.engine} {plan.weights}, {plan.slots} slots, {plan.hardware}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("concurrent", "tokens/s", "TTFT ms", "TPOT ms", "$ per M tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for load in plan.loads:
        table.add_row(
            str(load.concurrency),
            f"{load.tokens_per_second:.0f}",
            _number(1000 * load.ttft_seconds),
            _number(1000 * load.tpot_seconds),
            usd(load.usd_per_million_tokens),
            load.bound,
        )
    mib = 2**20
    fits = "fits" if plan.fits else "does not fit"
    lines = [
        f"Requests of {plan.lengths.input:.0f} input and {plan.lengths.output:.0f} output tokens "
        f"at ${plan.usd_per_hour:g} an hour.",
        f"Memory {plan.peak_bytes / mib:.0f} MiB of {plan.usable_bytes / mib:.0f} ({fits}): "
        f"weights {plan.weight_bytes / mib:.0f} MiB,",
        f"cache {plan.cache_bytes_per_request / mib:.1f} MiB a request; "
        f"{plan.requests_that_fit} full requests fit at once.",
    ]
    if plan.rate is not None:
        rate = plan.rate
        devices = "1 device" if rate.devices == 1 else f"{rate.devices} devices"
        lines += [
            f"{rate.requests_per_second:g} requests/s: {devices}, {rate.utilisation:.0%} used, "
            f"{rate.concurrency:.1f} concurrent requests on each,",
            f"a reply in {rate.reply_seconds:.2f} s, {usd(rate.usd_per_month)} a month, "
            f"{usd(rate.usd_per_million_tokens)} per million tokens.",
        ]
    lines += [f"{note[0].upper()}{note[1:]}." for note in plan.assumptions]
    return Group(table, *(Text(line) for line in lines))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
