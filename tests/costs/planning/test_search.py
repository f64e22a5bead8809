"""The search: what it tries, that nothing better was left, that a plan keeps what it promises, and what it says when
nothing fits.
"""

from pathlib import Path

import pytest

from config.errors import CostError
from config.load import load, write
from costs.planning.planner import plan
from costs.planning.search import Cheaper, Goal, Limits, _sections, cheapest, evaluate, within_total
from costs.planning.settings import runs_a_model, settings
from costs.planning.target import find_target
from tests.conftest import ROOT

LARGE = ["model.path=llama-3.1-8b", "model.random=null", "model.dtype=bf16"]
RUN = ("sft", "reward", "ppo", "evaluate")
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml") if path.name != "base.yaml")


def of_run(assignments: list[str], goal: Goal, adapters: bool, device: str | None = "a100-80") -> Cheaper:
    params = load(ROOT / "recipes" / "demo.yaml", assignments)
    return cheapest(params, find_target(params, device, 1, None, Path("nowhere")), RUN, goal, adapters)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("goal", ["usd", "memory"])
def test_the_file_that_is_written_is_planned_at_what_was_promised(
    recipe: str, goal: Goal, adapters: bool, tmp_path: Path
) -> None:
    params = load(ROOT / "recipes" / recipe)
    target = find_target(params, None, None, None, Path("nowhere"))
    best = cheapest(params, target, params.stages, goal, adapters)
    write(best.params, tmp_path / "best.yaml")
    written = load(tmp_path / "best.yaml")
    stages = {item.stage: item for item in plan(written, target, written.stages).stages}
    assert set(best.by_stage) == {stage for stage in stages if runs_a_model(params, stage)}
    for name, item in best.by_stage.items():
        result = stages[name]
        assert result.fits
        assert result.device_bytes_per_gpu == pytest.approx(item.best.device_bytes)
        judge = [phase for phase in result.phases if phase.phase == "judge"]  # no lever changes it
        assert result.seconds - sum(p.seconds for p in judge) == pytest.approx(item.best.seconds)
        assert result.usd.expected - sum(p.usd for p in judge) == pytest.approx(item.best.usd)


@pytest.mark.parametrize("goal", ["usd", "time", "memory"])
def test_no_combination_beats_the_winner_by_more_than_a_percent(goal: Goal) -> None:
    params = load(ROOT / "recipes" / "gpu-24gb.yaml")
    target = find_target(params, None, None, None, Path("nowhere"))
    best = cheapest(params, target, ("sft",), goal).by_stage["sft"]
    tried = [
        evaluate(settings(params.model_copy(update={"sft": section}), target)["sft"], target.of(params, "sft").price)
        for section in _sections(params, target, "sft", adapters=False)
    ]
    assert best.tried == len(tried) > 10

    def value(need: object) -> float:
        return float(getattr(need, {"usd": "usd", "time": "seconds", "memory": "device_bytes"}[goal]))

    assert value(best.best) <= 1.011 * min(value(need) for need in tried if need.fits)


def test_every_combination_trains_on_the_same_batch() -> None:
    params = load(ROOT / "recipes" / "gpu-24gb.yaml")
    target = find_target(params, None, None, None, Path("nowhere"))
    for stage in ("sft", "reward"):
        levers = [
            settings(params.model_copy(update={stage: section}), target)[stage].levers
            for section in _sections(params, target, stage, adapters=True)
        ]
        assert len({lever.micro_batch for lever in levers}) > 3
        assert len({lever.micro_batch * lever.accumulation for lever in levers}) == 1


def test_a_lever_without_benefit_is_left_as_it_is() -> None:
    best = of_run([], "time", adapters=False)
    assert best.params.sft.optimizer == "adamw"
    assert not best.params.sft.activation_checkpointing


def test_each_choice_says_what_it_alone_changes() -> None:
    small = ["model.path=llama-3.2-1b", *LARGE[1:], "sft.micro_batch_size=8"]
    result = of_run(small, "memory", adapters=False).by_stage["sft"]
    choices = {choice.key: choice for choice in result.choices}
    assert (choices["optimizer"].before, choices["optimizer"].after) == ("adamw", "adamw8bit")
    assert choices["optimizer"].reason.startswith("-")
    assert "GiB a device, +0.0% time" in choices["optimizer"].reason


def test_without_a_fit_the_smallest_need_is_reported() -> None:
    with pytest.raises(CostError, match=r"none of \d+ combinations of sft fits 1 x t4: the smallest needs [\d.]+ GiB"):
        of_run(["model.path=llama-3-70b", *LARGE[1:], "model.dtype=fp32"], "memory", False, "t4")


def test_a_total_above_the_budget_is_reported() -> None:
    result = of_run([], "usd", adapters=False).by_stage["sft"]
    within_total([result], Limits(max_usd=result.best.usd, max_hours=result.best.seconds / 3600))
    with pytest.raises(CostError, match="--max-usd"):
        within_total([result, result], Limits(max_usd=1.5 * result.best.usd))
    with pytest.raises(CostError, match="--max-hours"):
        within_total([result, result], Limits(max_hours=1.5 * result.best.seconds / 3600))


def test_an_unknown_goal_is_refused() -> None:
    with pytest.raises(CostError, match="plan optimise speed: it is not one of usd, time, memory"):
        of_run([], "speed", adapters=False)  # type: ignore[arg-type]


def test_least_memory_without_adapters_trains_all_weights_and_with_them_lora_over_four_bits() -> None:
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
    assert all(value.best.fits for value in best.by_stage.values())
    assert best.params.ppo.lora is not None
    assert sum(value.best.usd for value in best.by_stage.values()) <= sum(
        item.best.usd for item in of_run(LARGE, "memory", adapters=True).by_stage.values()
    )


def test_a_random_model_is_neither_quantised_nor_adapted_before_it_has_learnt() -> None:
    best = of_run(
        ["model.random.width=1024", "model.random.layers=12", "model.random.mlp_width=4096"], "memory", adapters=True
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
    result = of_run([*LARGE, f"ppo.lora={lora}"], "memory", adapters=True)
    for section in (result.params.sft, result.params.reward):
        assert section.lora == result.params.section("ppo").lora
    assert result.by_stage["sft"].best.setting.levers.lora_rank == 4
    other = lora.replace("rank: 4", "rank: 8")
    unlike = [*LARGE, f"ppo.lora={lora}", f"reward.lora={other}"]
    params = load(ROOT / "recipes" / "demo.yaml", unlike)
    target = find_target(params, "a100-80", 1, None, Path("nowhere"))
    sections = _sections(params, target, "sft", adapters=True)
    assert {section.lora for section in sections} == {None}  # type: ignore[attr-defined]


def test_over_four_bits_the_policy_of_ppo_is_an_adapter() -> None:
    params = load(ROOT / "recipes" / "demo.yaml", LARGE)
    target = find_target(params, "a100-80", 1, None, Path("nowhere"))
    stored = params.model_copy(update={"model": params.model.model_copy(update={"quantisation": "nf4"})})
    for result, whole in ((params, True), (stored, False)):
        sections = list(_sections(result, target, "ppo", adapters=True))
        assert any(section.lora is None for section in sections) == whole  # type: ignore[attr-defined]
        assert any(section.lora is not None for section in sections)  # type: ignore[attr-defined]


def test_a_student_in_no_folder_gets_no_adapter() -> None:
    params = load(ROOT / "recipes" / "smollm-distill.yaml")
    target = find_target(params, None, None, None, Path("nowhere"))
    best = cheapest(params, target, params.stages, "memory", adapters=True).params
    assert best.section("distill").lora is None


def test_a_budget_of_tokens_stays_where_the_micro_batch_does() -> None:
    best = of_run([], "time", adapters=False, device=None)
    assert not [change for change in best.changes if change.startswith("ppo.")]


@pytest.mark.parametrize("goal", ["usd", "memory"])
@pytest.mark.parametrize("adapters", [False, True])
def test_levers_of_divided_stages_are_those_that_params_may_say(goal: Goal, adapters: bool) -> None:
    params = load(ROOT / "recipes" / "node-8gpu.yaml")
    target = find_target(params, None, None, None, Path("nowhere"))
    cheapest_params = cheapest(params, target, ("sft", "reward"), goal, adapters).params
    assert cheapest_params.sft.optimizer == cheapest_params.reward.optimizer == "adamw"
    assert cheapest_params.model.quantisation is None
