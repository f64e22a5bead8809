"""The tables of `rlhf bench`."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from config.workspace.benchmarked import Benchmark, Load
from costs.formulas.serving import token_price


def bench_view(found: Benchmark, model: str) -> Group:
    """The loads, and what a million tokens cost at the knee."""
    served = f"{found.engine} {found.weights}".strip()
    table = Table(title=f"{model}, {served}", title_justify="left", box=None, pad_edge=False)
    for name in ("load", "tokens/s", "goodput", "TTFT p50", "p95", "TPOT p50", "p95", "failed"):
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=True)
    table.add_column("$ per M", justify="right", no_wrap=True)
    for load in found.loads:
        price = token_price(load.usage, found.usd_per_hour, "allocation")
        table.add_row(
            load_name(load),
            f"{load.tokens_per_second:.0f}",
            f"{load.goodput_per_second:.1f}/s",
            *(_ms(load.ttft_ms, p) for p in ("p50", "p95")),
            *(_ms(load.tpot_ms, p) for p in ("p50", "p95")),
            f"{load.failed}/{load.requests}",
            usd(price.blended),
        )
    return Group(table, *(Text(line) for line in notes(found)))


def notes(found: Benchmark) -> list[str]:
    """What the table does not say, in lines of at most 80 characters."""
    lines = [
        f"Times in ms. Goodput: TTFT up to {found.limits.ttft_ms:g} ms and TPOT up to "
        f"{found.limits.tpot_ms:g} ms.",
    ]
    at = found.at_knee()
    if at is None or found.knee is None:
        return lines
    until = (
        f"p95 TPOT has doubled at {found.knee.doubles_at}"
        if found.knee.doubles_at
        else "p95 TPOT does not double up to there"
    )
    lines.append(f"Knee: concurrency {found.knee.concurrency}; {until}.")
    for basis in ("allocation", "usage"):
        price = token_price(at.usage, found.usd_per_hour, basis)
        lines.append(
            f"{basis.capitalize():<11} {usd(price.input)} per million input tokens, "
            f"{usd(price.output)} output."
        )
    lines.append(f"At ${found.usd_per_hour:g} an hour for the server.")
    return lines


def load_name(load: Load) -> str:
    if load.concurrency is not None:
        return f"{load.concurrency} at work"
    return f"{load.requests_per_second:g}/s arrive"


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
