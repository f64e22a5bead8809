"""The search: what it tries, that nothing better was left, and what it says when nothing fits."""

from dataclasses import replace

import pytest

from config.errors import CostError
from costs.catalogue import price
from costs.search import Limits, combinations, evaluate, search, section_changes, within_total
from tests.costs.settings import ppo, sft

A100 = price("a100-80")


@pytest.mark.parametrize("goal", ["usd", "time", "memory"])
def test_the_winner_fits_and_no_combination_beats_it_by_more_than_a_percent(goal: str) -> None:
    setting = sft("llama-3.2-3b", micro_batch=16, accumulation=2, tokens=2048)
    found = search(setting, A100, goal)  # type: ignore[arg-type]
    assert found.best.fits
    value = {"usd": lambda c: c.usd, "time": lambda c: c.seconds, "memory": lambda c: c.device_bytes}[goal]
    fitting = [c for c in (evaluate(replace(setting, levers=levers), A100) for levers in combinations(setting)) if c.fits]
    assert value(found.best) <= 1.011 * min(value(c) for c in fitting)
    assert found.tried == len(list(combinations(setting)))


def test_the_search_covers_over_two_thousand_combinations() -> None:
    setting = sft("llama-3-8b", gpus=8, micro_batch=8, accumulation=8)
    assert len(list(combinations(setting, adapters=True))) >= 2000


def test_every_combination_trains_on_the_same_batch() -> None:
    setting = sft(micro_batch=4, accumulation=6)
    assert {levers.micro_batch * levers.accumulation for levers in combinations(setting)} == {24}


def test_a_lever_without_benefit_is_left_as_it_is() -> None:
    found = search(sft(micro_batch=4, tokens=256), A100, "usd")
    assert found.best.setting.levers.optimizer == "adamw"
    assert not found.best.setting.levers.offload_optimizer


def test_each_choice_says_what_it_alone_changes() -> None:
    setting = sft("llama-3-8b", micro_batch=16, tokens=2048, optimizer="adamw8bit")
    found = search(setting, A100, "usd")
    choices = {choice.lever: choice for choice in found.choices}
    assert not found.start.fits
    assert choices
    assert any("does not fit" in choice.reason for choice in choices.values())


def test_without_a_fit_the_smallest_need_is_told() -> None:
    with pytest.raises(CostError, match=r"none of \d+ combinations of sft fits 1 x t4: the smallest needs [\d.]+ GiB"):
        search(sft("llama-3-70b", device="t4"), price("t4"), "memory")


def test_a_budget_below_everything_is_told() -> None:
    with pytest.raises(CostError, match="Raise --max-usd"):
        search(sft(), A100, "usd", Limits(max_usd=1e-6))


def test_a_total_above_the_budget_is_told() -> None:
    found = search(sft(), A100, "usd")
    within_total([found], Limits(max_usd=found.best.usd, max_hours=found.best.seconds / 3600))
    with pytest.raises(CostError, match="--max-usd"):
        within_total([found, found], Limits(max_usd=1.5 * found.best.usd))
    with pytest.raises(CostError, match="--max-hours"):
        within_total([found, found], Limits(max_hours=1.5 * found.best.seconds / 3600))


def test_an_unknown_goal_is_refused() -> None:
    with pytest.raises(CostError, match="--optimise speed is not one of usd, time, memory"):
        search(sft(), A100, "speed")  # type: ignore[arg-type]


def test_the_winner_is_written_in_the_words_of_params() -> None:
    setting = sft(micro_batch=8, checkpointing="full")
    assert section_changes("sft", evaluate(setting, A100)) == {"micro_batch_size": 8, "activation_checkpointing": True}
    assert section_changes("reward", evaluate(setting, A100))["micro_batch_size"] == 4
    assert section_changes("ppo", evaluate(ppo(micro_batch=3), A100)) == {"micro_batch_tokens": 3 * 512}
