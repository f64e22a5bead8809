"""Time and tokens of each served model, and the price of a million of its tokens."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from config.workspace.benchmarked import Usage
from config.workspace.served import ServedRow
from costs.formulas.serving import BASES, split_method, token_price, usd_of_usage

logger = logging.getLogger(__name__)

Keep = Callable[[ServedRow], None]


class Price(NamedTuple):
    """Device of the server, and the name under which its models are registered."""

    usd_per_hour: float
    model_name: str


class Tokens(NamedTuple):
    """Tokens of a request and its reply, and the seconds before and after its first token; 0 by default."""

    prompt: int = 0
    reply: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def with_those_of(self, content: Mapping[str, Any]) -> "Tokens":
        """Add the counts of an answer or a chunk: `usage` as in OpenAI's API, and llama.cpp's `timings`, which leave
        out the wait for a slot.
        """
        usage, timings = content.get("usage") or {}, content.get("timings") or {}
        return Tokens(
            usage.get("prompt_tokens", self.prompt),
            usage.get("completion_tokens", self.reply),
            timings.get("prompt_ms", 1000 * self.prefill_seconds) / 1000,
            timings.get("predicted_ms", 1000 * self.decode_seconds) / 1000,
        )

    def timed(self, prefill_seconds: float, decode_seconds: float) -> "Tokens":
        """Set these seconds unless the engine measured them itself."""
        if self.prefill_seconds or self.decode_seconds:
            return self
        return self._replace(prefill_seconds=prefill_seconds, decode_seconds=decode_seconds)


@dataclass
class _Times:
    """Usage of one model, in wall seconds."""

    wall: float = 0.0
    busy: float = 0.0
    at_work: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prefill: float = 0.0
    decode: float = 0.0

    def usage(self) -> Usage:
        return Usage(
            wall_seconds=self.wall,
            busy_seconds=self.busy,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            prefill_seconds=self.prefill,
            decode_seconds=self.decode,
        )


class Account(Collector):
    """Usage of every model since the server started, by run."""

    def __init__(self, price: Price, keep: Keep | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`keep` stores a row of usage."""
        self._price, self._keep, self._clock = price, keep, clock
        self._times: dict[str, _Times] = {}
        self._served: dict[str, tuple[str, float]] = {}
        self._at = clock()
        self._recorded: dict[str, Usage] = {}

    def serves(self, run_id: str, side: str = "served", share: float = 1.0) -> None:
        """Charge a share of the server's time to this model from now on, instead of the one before it on its side."""
        self._tick()
        self._served[side] = run_id, share
        self._times.setdefault(run_id, _Times())

    @contextmanager
    def at_work(self, run_id: str) -> Iterator[None]:
        """Enter around a request."""
        times = self._times.setdefault(run_id, _Times())
        self._tick()
        times.at_work += 1
        try:
            yield
        finally:
            self._tick()
            times.at_work -= 1

    def answered(self, run_id: str, tokens: Tokens) -> None:
        """Record a finished reply."""
        times = self._times.setdefault(run_id, _Times())
        times.input_tokens += tokens.prompt
        times.output_tokens += tokens.reply
        times.prefill += tokens.prefill_seconds
        times.decode += tokens.decode_seconds

    def usages(self) -> dict[str, Usage]:
        """Totals by run."""
        self._tick()
        return {run_id: times.usage() for run_id, times in self._times.items()}

    def record(self) -> None:
        """Keep the usage since the last call."""
        if self._keep is None:
            return
        for run_id, usage in self.usages().items():
            before = self._recorded.get(run_id)
            added = usage if before is None else minus(usage, before)
            if added.wall_seconds > 0 or added.output_tokens > 0:
                rate = self._price.usd_per_hour
                row = ServedRow(time=time.time(), run_id=run_id, usd_per_hour=rate, usage=added)
                try:
                    self._keep(row)
                except OSError as error:  # counted with the next row
                    logger.warning("what was served is not recorded: %s", error)
                    continue
            self._recorded[run_id] = usage

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """OpenCost's metrics. Its namespace label is a Kubernetes namespace, which does not exist here."""
        hourly = GaugeMetricFamily(
            "llm_total_cost",
            "US dollars an hour; usage leaves out the time without a request.",
            labels=["model_name", "model_version", "cost_basis"],
        )
        each_million = GaugeMetricFamily(
            "llm_cost_per_million_tokens",
            "US dollars per million tokens since the model is served: of all tokens, or of those of a phase.",
            labels=["model_name", "model_version", "cost_basis", "phase", "allocation_method"],
        )
        rate, name = self._price
        for run_id, usage in self.usages().items():
            hours = usage.wall_seconds / 3600
            for basis in BASES:
                if hours > 0:
                    usd = usd_of_usage(usage, rate, basis)
                    hourly.add_metric([name, run_id, basis], usd / hours)
                price = token_price(usage, rate, basis)
                phases = {"": price.blended, "prompt": price.input, "generation": price.output}
                for phase, value in phases.items():
                    method = split_method(usage) if phase else ""
                    if value is not None:
                        each_million.add_metric([name, run_id, basis, phase, method], value)
        yield hourly
        yield each_million

    def _tick(self) -> None:
        """Add the time since the last change."""
        now = self._clock()
        passed, self._at = now - self._at, now
        for run_id, share in self._served.values():
            self._times[run_id].wall += passed * share
        for times in self._times.values():
            times.busy += passed * (times.at_work > 0)


def minus(usage: Usage, before: Usage) -> Usage:
    """The increase of a usage."""
    names = type(usage).model_fields
    return Usage(**{name: getattr(usage, name) - getattr(before, name) for name in names})
