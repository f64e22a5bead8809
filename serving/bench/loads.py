"""Loads on an endpoint, one after the other: a constant number of concurrent requests (closed
loop), or requests that arrive at a rate, however many are unanswered (open loop).
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("LLMETER_DISABLE_ALL_PROGRESS_BARS", "1")  # read as llmeter is imported

from llmeter.endpoints.base import InvocationResponse
from llmeter.results import Result
from llmeter.runner import Runner

from config.workspace.benchmarked import Limits, Load
from serving.bench.endpoint import ChatEndpoint
from serving.bench.measured import Reply, measured_load

MOST_ARRIVALS = 2000
"""Of one open-loop load: each has a thread of its own."""
START_SECONDS = 0.2
"""Until the first arrival, while the threads start."""


class LoadSpec(NamedTuple):
    """One load that is to be measured: either a concurrency or a rate."""

    concurrency: int | None = None
    requests_per_second: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.requests_per_second:g} requests/s"


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, in the middle of a load."""


def measure(
    endpoint: ChatEndpoint,
    plans: Sequence[LoadSpec],
    payloads: Sequence[Mapping[str, Any]],
    seconds: float,
    limits: Limits,
    seed: int = 0,
) -> Iterator[Load]:
    """Each load for `seconds`. A load is yielded as soon as it is measured.

    Raises Interrupted when the process is asked to stop.
    """
    logging.getLogger("llmeter").setLevel(logging.CRITICAL)  # failures are counted, not printed
    for plan in plans:
        drawn = random.Random(f"{seed} {plan}")
        order = [dict(each) for each in drawn.sample(list(payloads), len(payloads))]
        if plan.concurrency is not None:
            yield asyncio.run(_closed(endpoint, plan.concurrency, order, seconds, limits))
        else:
            rate = plan.requests_per_second or 1.0
            arrivals = list(poisson(rate, seconds, drawn))[:MOST_ARRIVALS]
            yield asyncio.run(_open(endpoint, rate, order, arrivals, limits))


def poisson(rate: float, seconds: float, drawn: random.Random) -> Iterator[float]:
    """Arrival times within `seconds`: independent requests, `rate` a second on average. At least
    one.
    """
    at = drawn.expovariate(rate)
    yield min(at, seconds)
    while (at := at + drawn.expovariate(rate)) < seconds:
        yield at


async def _closed(
    endpoint: ChatEndpoint,
    clients: int,
    payloads: list[dict[str, Any]],
    seconds: float,
    limits: Limits,
) -> Load:
    endpoint.at_once()
    result = await _run(endpoint, payloads, clients=clients, run_duration=seconds)
    replies = _replies(result.responses)
    begin = min((each.sent for each in replies), default=0.0)
    return measured_load(replies, begin, begin + seconds, limits, concurrency=clients)


async def _open(
    endpoint: ChatEndpoint,
    rate: float,
    payloads: list[dict[str, Any]],
    arrivals: list[float],
    limits: Limits,
) -> Load:
    begin = time.perf_counter() + START_SECONDS
    endpoint.arrive_at([begin + arrival for arrival in arrivals])
    result = await _run(endpoint, payloads, clients=len(arrivals), n_requests=1)
    replies = _replies(result.responses)
    first = min((each.sent for each in replies), default=0.0)
    return measured_load(replies, first, first + arrivals[-1], limits, requests_per_second=rate)


async def _run(endpoint: ChatEndpoint, payloads: list[dict[str, Any]], **load: Any) -> Result:
    runner = Runner(endpoint=endpoint, payload=payloads, timeout=3600)
    result = await runner.run(**load)
    if result.stats.get("interrupted"):
        endpoint.stop()  # else the process waits for its threads
        raise Interrupted
    return result


def _replies(responses: Sequence[InvocationResponse]) -> list[Reply]:
    return [
        Reply(
            sent=each.request_time.timestamp() if each.request_time else 0.0,
            ttft_seconds=each.time_to_first_token or 0.0,
            seconds=each.time_to_last_token or 0.0,
            input_tokens=each.num_tokens_input or 0,
            output_tokens=each.num_tokens_output or 0,
            prefill_seconds=each.annotations.get("prefill_seconds"),
            fault=each.error,
        )
        for each in responses
    ]
