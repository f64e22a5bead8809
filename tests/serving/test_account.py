"""Whose time the server's is, with a clock that the tests turn."""

import pytest
from prometheus_client import CollectorRegistry

from config.workspace.served import ServedRow
from serving.account import Account, Price, Tokens


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, kept: list[ServedRow] | None = None) -> Account:
    return Account(Price(3.6, "assistant"), None if kept is None else kept.append, clock)


def test_time_belongs_to_the_model_that_is_served_and_is_busy_once() -> None:
    clock = Clock()
    result = account(clock)
    result.serves("first")
    clock.now += 5
    with result.at_work("first"):
        clock.now += 1
        with result.at_work("first"):  # side by side: still one busy second a second
            clock.now += 2
        result.answered("first", Tokens(10, 4, 0.5, 1.5))
        result.serves("second")  # takes over while the first still answers
        clock.now += 3
    clock.now += 1
    first, second = result.usages()["first"], result.usages()["second"]
    assert (first.wall_seconds, first.busy_seconds) == (8, 6)
    assert (second.wall_seconds, second.busy_seconds) == (4, 0)
    assert (first.input_tokens, first.output_tokens) == (10, 4)
    assert (first.prefill_seconds, first.decode_seconds) == (0.5, 1.5)


def test_the_metrics_are_opencosts() -> None:
    clock = Clock()
    result = account(clock)
    registry = CollectorRegistry()
    registry.register(result)
    result.serves("run-a")
    with result.at_work("run-a"):
        clock.now += 10
        result.answered("run-a", Tokens(600, 400, 2.0, 6.0))
    clock.now += 10

    def value(name: str, **labels: str) -> float | None:
        model = {"model_name": "assistant", "model_version": "run-a"}
        return registry.get_sample_value(name, model | labels)

    assert value("llm_total_cost", cost_basis="allocation") == pytest.approx(3.6)
    assert value("llm_total_cost", cost_basis="usage") == pytest.approx(1.8)
    name = "llm_cost_per_million_tokens"
    blended = {"phase": "", "allocation_method": ""}
    assert value(name, cost_basis="allocation", **blended) == pytest.approx(0.02 / 1000 * 1e6)
    assert value(name, cost_basis="usage", **blended) == pytest.approx(0.01 / 1000 * 1e6)
    prompt = {"phase": "prompt", "allocation_method": "compute_time"}
    assert value(name, cost_basis="allocation", **prompt) == pytest.approx(0.005 / 600 * 1e6)
    generation = {"phase": "generation", "allocation_method": "compute_time"}
    assert value(name, cost_basis="usage", **generation) == pytest.approx(0.0075 / 400 * 1e6)


def test_rows_hold_what_was_added_since_the_last_ones() -> None:
    clock, kept = Clock(), []
    result = account(clock, kept)
    result.serves("run-a")
    clock.now += 7
    result.answered("run-a", Tokens(3, 2))
    result.record()
    clock.now += 5
    result.answered("run-a", Tokens(30, 20))
    result.record()
    result.record()  # nothing since: no row
    assert [(row.usage.wall_seconds, row.usage.output_tokens) for row in kept] == [(7, 2), (5, 20)]
    assert {row.usd_per_hour for row in kept} == {3.6}


def test_a_row_that_cannot_be_written_is_part_of_the_next(caplog: pytest.LogCaptureFixture) -> None:
    clock, kept = Clock(), []
    full = True

    def keep(row: ServedRow) -> None:
        if full:
            raise OSError("No space left on device")
        kept.append(row)

    result = Account(Price(3.6, "assistant"), keep, clock)
    result.serves("run-a")
    clock.now += 7
    result.record()
    assert "No space left on device" in caplog.text
    full = False
    clock.now += 5
    result.record()
    assert [row.usage.wall_seconds for row in kept] == [12]
