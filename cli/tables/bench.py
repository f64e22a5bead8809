"""The tables of `rlhf bench` and of `rlhf plan serve`."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from config.workspace.benchmarked import Benchmark, Load
from costs.formulas.serving import BASES, price_of
from costs.planning.serving import ServingPlan


def bench_view(found: Benchmark, model: str, plan: ServingPlan | None) -> Group:
    """The loads beside their plan, and what a million tokens cost at the knee."""
    planned = {each.concurrency: each for each in plan.loads} if plan else {}
    served = f"{found.engine} {found.weights}".strip()
    table = Table(title=f"{model}, {served}", title_justify="left", box=None, pad_edge=False)
    latencies = ("TTFT p50", "p95", "TPOT p50", "p95")
    for name in ("clients", "tok/s", "plan", "goodput", *latencies, "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("$ per M", justify="right", no_wrap=True)
    for load in found.loads:
        price = price_of(found, load)
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
    return Group(table, *(Text(line) for line in notes(found, plan)))


def notes(found: Benchmark, plan: ServingPlan | None) -> list[str]:
    """What the table leaves out, in lines of at most 80 characters."""
    lines = [
        f"Times in ms. Goodput: TTFT up to {found.limits.ttft_ms:g} ms and TPOT up to "
        f"{found.limits.tpot_ms:g} ms.",
    ]
    if plan is not None and found.peak_bytes is not None:
        lines.append(
            f"Memory: {found.peak_bytes / 2**20:.0f} MiB, planned {plan.peak_bytes / 2**20:.0f}."
        )
    if plan is not None and plan.slower is not None:
        lines.append(
            f"Plan: for this machine's pace now, {plan.slower:.2f} times the seconds of its "
            "calibration."
        )
    if plan is not None and not plan.calibrated:
        lines.append("Plan: by another machine's rates; rlhf calibrate measures those of this one.")
    at = found.at_knee()
    if at is None or found.knee is None:
        return lines
    until = (
        f"p95 TPOT has doubled at {found.knee.doubles_at}"
        if found.knee.doubles_at
        else "p95 TPOT does not double up to there"
    )
    lines.append(f"Knee: concurrency {found.knee.concurrency}; {until}.")
    for basis in BASES:
        price = price_of(found, at, basis)
        lines.append(
            f"{basis.capitalize():<11} {usd(price.input)} per million input tokens, "
            f"{usd(price.output)} output."
        )
    lines.append(f"At ${found.usd_per_hour:g} an hour for the server.")
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


def _ms(found: object, name: str) -> str:
    value = getattr(found, name, None)
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def plan_view(found: ServingPlan) -> Group:
    """Memory, the rates of rising loads, and the devices for a rate of requests."""
    title = f"serve: {found.engine} {found.weights}, {found.slots} slots, {found.hardware}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("concurrent", "tokens/s", "TTFT ms", "TPOT ms", "$ per M tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for load in found.loads:
        table.add_row(
            str(load.concurrency),
            f"{load.tokens_per_second:.0f}",
            _number(1000 * load.ttft_seconds),
            _number(1000 * load.tpot_seconds),
            usd(load.usd_per_million_tokens),
            load.bound,
        )
    mib = 2**20
    fits = "fits" if found.fits else "does not fit"
    lines = [
        f"Requests of {found.lengths.input:.0f} input and {found.lengths.output:.0f} output tokens "
        f"at ${found.usd_per_hour:g} an hour.",
        f"Memory {found.peak_bytes / mib:.0f} MiB of {found.usable_bytes / mib:.0f} ({fits}): "
        f"weights {found.weight_bytes / mib:.0f} MiB,",
        f"cache {found.cache_bytes_per_request / mib:.1f} MiB a request; "
        f"{found.requests_that_fit} full requests fit at once.",
    ]
    if found.rate is not None:
        rate = found.rate
        devices = "1 device" if rate.devices == 1 else f"{rate.devices} devices"
        lines += [
            f"{rate.requests_per_second:g} requests/s: {devices}, {rate.utilisation:.0%} used, "
            f"{rate.concurrency:.1f} concurrent requests on each,",
            f"a reply in {rate.reply_seconds:.2f} s, {usd(rate.usd_per_month)} a month, "
            f"{usd(rate.usd_per_million_tokens)} per million tokens.",
        ]
    lines += [f"{note[0].upper()}{note[1:]}." for note in found.assumptions]
    return Group(table, *(Text(line) for line in lines))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
