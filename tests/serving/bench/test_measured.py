"""What replies say of a load: hand-computed."""

import pytest

from config.workspace.benchmarked import Limits, Load
from serving.bench.measured import Reply, covered, knee_of, measured_load, percentiles


def reply(sent: float, ttft: float = 1.0, seconds: float = 3.0, output: int = 5) -> Reply:
    return Reply(sent, ttft, seconds, input_tokens=10, output_tokens=output)


def test_a_load_counts_what_came_within_its_time() -> None:
    # the second reply ends 2 s after the load: half of its tokens after the first came within
    replies = [reply(0.0), reply(7.0, ttft=1.0, seconds=5.0, output=5)]
    load = measured_load(replies, 0.0, 10.0, Limits(), concurrency=1)
    assert load.tokens_per_second == pytest.approx((5 + 1 + 4 * 2 / 4) / 10)
    assert load.replies_per_second == pytest.approx((1 + 3 / 5) / 10)
    assert load.input_tokens_per_second == pytest.approx(10 * (1 + 3 / 5) / 10)
    assert load.usage.busy_seconds == pytest.approx(3 + 3)
    assert load.usage.prefill_seconds == pytest.approx(1 + 0.6)
    assert load.usage.decode_seconds == pytest.approx(2 + 0.6 * 4)
    assert load.ttft_ms is not None
    assert load.ttft_ms.p50 == pytest.approx(1000)
    assert load.tpot_ms is not None
    assert load.tpot_ms.p99 == pytest.approx(995)


def test_goodput_counts_replies_within_both_limits() -> None:
    replies = [reply(0.0), reply(0.0, ttft=2.0, seconds=4.0), reply(0.0, ttft=1.0, seconds=9.0)]
    limits = Limits(ttft_ms=1500, tpot_ms=600)
    load = measured_load(replies, 0.0, 10.0, limits, concurrency=3)
    assert load.goodput_per_second == pytest.approx(0.1)
    assert load.replies_per_second == pytest.approx(0.3)


def test_failures_are_counted_and_never_as_speed() -> None:
    lost = Reply(1.0, 0.0, 0.0, 0, 0, fault="HTTP 429")
    load = measured_load([reply(0.0), lost, lost], 0.0, 10.0, Limits(), requests_per_second=0.3)
    assert (load.requests, load.failed, load.fault) == (3, 2, "HTTP 429")
    assert load.tokens_per_second == pytest.approx(0.5)
    only = measured_load([lost], 0.0, 10.0, Limits(), concurrency=1)
    assert only.ttft_ms is None
    assert only.tpot_ms is None
    assert only.tokens_per_second == 0


def test_percentiles_lie_between_the_neighbours() -> None:
    result = percentiles([0.001 * n for n in range(101)])
    assert result is not None
    assert (result.p50, result.p95, result.p99) == pytest.approx((50, 95, 99))
    assert percentiles([]) is None


def load_at(concurrency: int, tpot_ms: float) -> Load:
    seconds = 1.0 + 4 * tpot_ms / 1000
    replies = [reply(0.0, seconds=seconds) for _ in range(concurrency)]
    return measured_load(replies, 0.0, 10.0, Limits(), concurrency=concurrency)


def test_the_knee_is_the_last_load_before_tpot_doubles() -> None:
    loads = [load_at(n, tpot) for n, tpot in ((1, 10), (2, 12), (4, 19), (8, 25), (16, 18))]
    knee = knee_of(loads)
    assert knee is not None
    assert (knee.concurrency, knee.doubles_at) == (4, 8)
    flat = knee_of(loads[:3])
    assert flat is not None
    assert (flat.concurrency, flat.doubles_at) == (4, None)
    assert knee_of([]) is None


def test_time_is_busy_once_however_requests_overlap() -> None:
    spans = [(0.0, 8.0), (1.0, 2.0), (7.0, 9.0), (12.0, 30.0)]
    assert covered(spans, 0.0, 20.0) == pytest.approx(9 + 8)
    assert covered(spans, 3.0, 13.0) == pytest.approx(6 + 1)
    assert covered([], 0.0, 20.0) == 0
