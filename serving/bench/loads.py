"""Loads on an endpoint, one after the other: a constant number of concurrent requests (closed loop), or requests that
arrive at a rate, however many are unanswered (open loop).
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from config.workspace.benchmarked import Limits, Load
from serving.bench.endpoint import ChatEndpoint
from serving.bench.measured import Reply, measured_load

MOST_ARRIVALS = 2000
"""Most requests of an open-loop load: each has its own thread."""
START_SECONDS = 0.2
"""Seconds before the first arrival, while the threads start."""


class LoadSpec(NamedTuple):
    """One load to measure: a concurrency or a rate."""

    concurrency: int | None = None
    requests_per_second: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"{self.requests_per_second:g} requests/s"


class Interrupted(Exception):
    """Ctrl-C or SIGTERM during a load."""


def measure(
    endpoint: ChatEndpoint,
    specs: Sequence[LoadSpec],
    payloads: Sequence[Mapping[str, Any]],
    seconds: float,
    limits: Limits,
    seed: int = 0,
) -> Iterator[Load]:
    """Measure each load for `seconds` and yield it at once.

    Raises Interrupted when the process is asked to stop.
    """
    logging.getLogger("llmeter").setLevel(logging.CRITICAL)  # failures are counted, not printed
    for spec in specs:
        rng = random.Random(f"{seed} {spec}")
        order = [dict(payload) for payload in rng.sample(list(payloads), len(payloads))]
        if spec.concurrency is not None:
            yield asyncio.run(_closed(endpoint, spec.concurrency, order, seconds, limits))
        else:
            rate = spec.requests_per_second or 1.0
            arrivals = list(islice(poisson(rate, seconds, rng), MOST_ARRIVALS))
            whole = seconds if len(arrivals) < MOST_ARRIVALS else arrivals[-1]
            yield asyncio.run(_open(endpoint, rate, order, arrivals, whole, limits))


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Arrival times within `seconds`: independent requests, `rate` a second on average. At least one."""
    at = rng.expovariate(rate)
    yield min(at, seconds / 2)
    while (at := at + rng.expovariate(rate)) < seconds:
        yield at


async def _closed(
    endpoint: ChatEndpoint, clients: int, payloads: list[dict[str, Any]], seconds: float, limits: Limits
) -> Load:
    endpoint.send_in_turn(payloads)
    replies = await _replies(endpoint, payloads, clients=clients, run_duration=seconds)
    begin = min((reply.sent for reply in replies), default=0.0)
    return measured_load(replies, begin, begin + seconds, limits, concurrency=clients)


async def _open(
    endpoint: ChatEndpoint,
    rate: float,
    payloads: list[dict[str, Any]],
    arrivals: list[float],
    seconds: float,
    limits: Limits,
) -> Load:
    start = time.perf_counter() + START_SECONDS
    endpoint.send_in_turn(payloads, [start + arrival for arrival in arrivals])
    replies = await _replies(endpoint, payloads, clients=len(arrivals), n_requests=1)
    begin = min((reply.sent for reply in replies), default=0.0) - arrivals[0]
    return measured_load(replies, begin, begin + seconds, limits, requests_per_second=rate)


async def _cancel_other_tasks() -> None:
    """Cancel LLMeter's tasks until they have ended.

    One that waits with a timeout can miss a cancellation, and the event loop would then wait for it forever
    (https://github.com/python/cpython/issues/86296).
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.1)


async def _replies(endpoint: ChatEndpoint, payloads: list[dict[str, Any]], **load: Any) -> list[Reply]:
    os.environ.setdefault("LLMETER_DISABLE_ALL_PROGRESS_BARS", "1")  # read at import
    from llmeter.runner import Runner

    result = await Runner(endpoint=endpoint, payload=payloads, timeout=3600).run(**load)
    if result.stats.get("interrupted"):
        endpoint.stop()  # otherwise the process waits for its threads
        await _cancel_other_tasks()
        raise Interrupted
    return [
        Reply(
            sent=response.request_time.timestamp() if response.request_time else 0.0,
            # an empty reply has no first token: EOS came instead of it
            ttft_seconds=response.time_to_first_token or response.time_to_last_token or 0.0,
            seconds=response.time_to_last_token or 0.0,
            input_tokens=response.num_tokens_input or 0,
            output_tokens=response.num_tokens_output or 0,
            fault=response.error,
        )
        for response in result.responses
    ]
