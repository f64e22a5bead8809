"""The price of a million tokens."""

from typing import Literal, NamedTuple

from config.workspace.benchmarked import Benchmark, Load, Usage

MILLION = 1e6
OUTPUT_TO_INPUT = 2.5
"""Price of an output token relative to an input token if neither was timed: OpenCost's default."""
CostBasis = Literal["allocation", "usage"]
BASES: tuple[CostBasis, ...] = ("allocation", "usage")


class TokenPrice(NamedTuple):
    """US dollars per million tokens; None without tokens."""

    blended: float | None
    """Price of input and output tokens together."""
    input: float | None
    output: float | None


def usd_of_usage(usage: Usage, usd_per_hour: float, basis: CostBasis) -> float:
    """allocation: the server's hourly price for all of the time, idle or not; it adds up to the bill. usage: for the
    time with requests only; the difference is the price of idling.

    Source: OpenCost, "AI Inference Cost Tracking", whose two bases these are.
    """
    seconds = usage.wall_seconds if basis == "allocation" else usage.busy_seconds
    return usd_per_hour * seconds / 3600


def token_price(usage: Usage, usd_per_hour: float, basis: CostBasis) -> TokenPrice:
    """The price of a million tokens, and of input and output tokens apart:

        input = usd x prefill / (prefill + decode) / input tokens

    by the seconds that requests spend until their first token, and after it. Where they were not timed an output token
    costs 2.5 times an input token.

    Source: OpenCost, "AI Inference Cost Tracking" (compute_time, multiplier).
    """
    usd = usd_of_usage(usage, usd_per_hour, basis)
    if split_method(usage) == "compute_time":
        share = usage.prefill_seconds / (usage.prefill_seconds + usage.decode_seconds)
    else:
        weighted = usage.input_tokens + OUTPUT_TO_INPUT * usage.output_tokens
        share = usage.input_tokens / weighted if weighted else 0.0
    return TokenPrice(
        _per_million(usd, usage.input_tokens + usage.output_tokens),
        _per_million(usd * share, usage.input_tokens),
        _per_million(usd * (1 - share), usage.output_tokens),
    )


def price_of(benchmark: Benchmark, load: Load, basis: CostBasis = "allocation") -> TokenPrice:
    """The price of a load that was benchmarked."""
    return token_price(load.usage, benchmark.usd_per_hour, basis)


def split_method(usage: Usage) -> str:
    """How a price is split into input and output, in OpenCost's terms."""
    timed = usage.prefill_seconds + usage.decode_seconds > 0
    return "compute_time" if timed else "multiplier"


def _per_million(usd: float, tokens: float) -> float | None:
    return MILLION * usd / tokens if tokens > 0 else None


def payback_tokens(extra_usd: float, usd_per_million: float, cheaper_usd_per_million: float) -> float | None:
    """Tokens after which a cheaper variant has paid for its own cost:

    extra_usd / (usd_per_million - cheaper_usd_per_million) x 1e6

    None if it is not cheaper.
    """
    saved = usd_per_million - cheaper_usd_per_million
    return MILLION * extra_usd / saved if saved > 0 else None
