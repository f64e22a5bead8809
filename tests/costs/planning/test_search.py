"""The search: what it tries, that nothing better was left, and what it says when nothing fits."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from config.errors import CostError
from config.load import load
from costs.formulas.setting import Levers
from costs.planning.cheaper import Cheaper, allowed_levers, cheapest
from costs.planning.search import (
    Limits,
    combinations,
    evaluate,
    search,
    section_changes,
    within_total,
)
from costs.planning.target import target
from costs.tables.catalogue import price
from tests.conftest import ROOT
from tests.costs.settings import ppo, sft

A100 = price("a100-80")


@pytest.mark.parametrize("goal", ["usd", "time", "memory"])
def test_the_winner_fits_and_no_combination_beats_it_by_more_than_a_percent(goal: str) -> None:
    setting = sft("llama-3.2-3b", micro_batch=16, accumulation=2, tokens=2048)
    found = search(setting, A100, goal)  # type: ignore[arg-type]
    assert found.best.fits
    value = {
        "usd": lambda c: c.usd,
        "time": lambda c: c.seconds,
        "memory": lambda c: c.device_bytes,
    }[goal]
    fitting = [
        c
        for c in (
            evaluate(replace(setting, levers=levers), A100) for levers in combinations(setting)
        )
        if c.fits
    ]
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


def test_without_a_fit_the_smallest_need_is_reported() -> None:
    with pytest.raises(
        CostError,
        match=r"none of \d+ combinations of sft fits 1 x t4: the smallest needs [\d.]+ GiB",
    ):
        search(sft("llama-3-70b", device="t4"), price("t4"), "memory")


def test_a_budget_below_everything_is_reported() -> None:
    with pytest.raises(CostError, match="Raise --max-usd"):
        search(sft(), A100, "usd", Limits(max_usd=1e-6))


def test_a_total_above_the_budget_is_reported() -> None:
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
    said = {"micro_batch_size": 8, "activation_checkpointing": True, "optimizer": "adamw"}
    assert section_changes("sft", evaluate(setting, A100)) == said
    assert section_changes("reward", evaluate(setting, A100))["micro_batch_size"] == 4
    of_ppo = section_changes(
        "ppo", evaluate(ppo(micro_batch=3, optimizer="adamw8bit", checkpointing="full"), A100)
    )
    assert of_ppo == {
        "micro_batch_tokens": 3 * 512,
        "activation_checkpointing": True,
        "optimizer": "adamw8bit",
    }


LARGE = ["model.path=llama-3.1-8b", "model.random=null", "model.dtype=bf16"]
RUN = ("sft", "reward", "ppo", "evaluate")


def of_run(
    assignments: list[str], goal: str, adapters: bool, device: str | None = "a100-80"
) -> Cheaper:
    params = load(Path("recipes/demo.yaml"), assignments)
    return cheapest(params, target(params, device, 1, None, Path("nowhere")), RUN, goal, adapters)  # type: ignore[arg-type]


def test_what_params_can_say_alone_is_searched_unless_all_is_free() -> None:
    setting = sft(micro_batch=8, gpus=2)
    said = {
        (each.optimizer, each.parallel, each.checkpointing, each.tuning)
        for each in combinations(setting, free=False)
    }
    assert said == {
        (optimizer, "ddp", how, "full")
        for optimizer in ("adamw", "adamw8bit")
        for how in ("none", "full")
    }


def test_least_memory_without_adapters_trains_all_weights_and_with_them_lora_over_four_bits() -> (
    None
):
    small = ["ppo.layout=shared_trunk", "model.path=llama-3.2-1b", *LARGE[1:]]
    full, lora = (of_run(small, "memory", adapters).params for adapters in (False, True))
    for stage in ("sft", "reward", "ppo"):
        assert getattr(full, stage).lora is None
        assert getattr(full, stage).optimizer == "adamw8bit"
        assert getattr(lora, stage).lora.rank == 16
    assert (full.model.quantisation, lora.model.quantisation) == (None, "nf4")


def test_a_run_that_fits_with_adapters_alone_is_refused_without_them_and_found_with_them() -> None:
    with pytest.raises(CostError, match="--adapters"):
        of_run(LARGE, "usd", adapters=False)
    best = of_run(LARGE, "usd", adapters=True)
    assert all(each.best.fits for each in best.found.values())
    assert best.params.ppo.lora is not None
    assert sum(each.best.usd for each in best.found.values()) <= sum(
        each.best.usd for each in of_run(LARGE, "memory", adapters=True).found.values()
    )


def test_a_random_model_is_neither_quantised_nor_adapted_before_it_has_learnt() -> None:
    best = of_run(
        ["model.random.width=1024", "model.random.layers=12", "model.random.mlp_width=4096"],
        "memory",
        adapters=True,
    ).params
    assert best.model.quantisation is None
    assert best.sft.lora is None
    assert best.ppo.lora is not None


def test_an_adapter_that_is_there_stays_as_it_is() -> None:
    lora = "{rank: 4, alpha: 4.0, modules: [q], dropout: 0.0}"
    best = of_run([*LARGE, f"sft.lora={lora}", f"ppo.lora={lora}"], "memory", adapters=True).params
    assert best.sft.lora is not None
    assert best.ppo.lora is not None
    assert (best.sft.lora.rank, best.sft.lora.alpha, best.ppo.lora.modules) == (4, 4.0, ["q"])


def test_a_new_adapter_is_like_those_that_it_has_to_be_a_copy_of_or_is_none() -> None:
    lora = "{rank: 4, alpha: 4.0, modules: [q], dropout: 0.0}"
    found = of_run([*LARGE, f"ppo.lora={lora}"], "memory", adapters=True)
    for section in (found.params.sft, found.params.reward):
        assert section.lora == found.params.section("ppo").lora
    assert found.found["sft"].best.setting.levers.lora_rank == 4
    other = lora.replace("rank: 4", "rank: 8")
    params = load(Path("recipes/demo.yaml"), [*LARGE, f"ppo.lora={lora}", f"reward.lora={other}"])
    full, qlora = Levers(), Levers(tuning="lora", quantisation="nf4")
    assert [allowed_levers(params, "sft", "nf4")(levers) for levers in (full, qlora)] == [
        True,
        False,
    ]


def test_over_four_bits_the_policy_of_ppo_is_an_adapter() -> None:
    params = load(Path("recipes/demo.yaml"), LARGE)
    full, qlora = Levers(), Levers(tuning="lora", quantisation="nf4")
    assert [allowed_levers(params, "ppo", "nf4")(levers) for levers in (full, qlora)] == [
        False,
        True,
    ]
    assert [allowed_levers(params, "sft", "nf4")(levers) for levers in (full, qlora)] == [
        True,
        True,
    ]
    assert [allowed_levers(params, "ppo", None)(levers) for levers in (full, qlora)] == [
        True,
        False,
    ]


def test_a_budget_of_tokens_stays_where_the_micro_batch_does() -> None:
    best = of_run([], "time", adapters=False, device=None)
    assert not [change for change in best.changes if change.startswith("ppo.")]


def test_two_thousand_combinations_take_at_most_five_cpu_seconds() -> None:
    setting = sft("llama-3-8b", gpus=8, micro_batch=8, accumulation=8)
    began = time.process_time()
    found = search(setting, A100, "usd", adapters=True)
    assert found.tried >= 2000
    assert time.process_time() - began < 5


@pytest.mark.parametrize("goal", ["usd", "memory"])
@pytest.mark.parametrize("adapters", [False, True])
def test_levers_of_divided_stages_are_those_that_params_may_say(goal: str, adapters: bool) -> None:
    params = load(ROOT / "recipes" / "node-8gpu.yaml")
    aim = target(params, None, None, None, Path("nowhere"))
    made = cheapest(params, aim, ("sft", "reward"), goal, adapters).params  # type: ignore[arg-type]
    assert made.sft.optimizer == made.reward.optimizer == "adamw"
    assert made.model.quantisation is None
    alone = load(ROOT / "recipes" / "node-8gpu.yaml", ["where.default.sharding=none"])
    levers = Levers(optimizer="adamw8bit")
    assert allowed_levers(alone, "sft", None)(levers)
    assert not allowed_levers(params, "sft", None)(levers)
