"""What `rlhf plan explain` shows is the plan's own: phases and resources."""

from pathlib import Path

import pytest

from config.errors import CostError
from config.load import load
from config.workspace.machine import Machine
from costs.planning.explain import Explanation, explain_params, resources
from costs.planning.phases import phases
from costs.planning.planner import plan
from costs.planning.target import Target, find_target
from costs.tables.catalogue import own_price
from tests.conftest import ROOT
from tests.costs.machines import machine
from tests.costs.planning.test_machine import device
from tests.costs.settings import sft

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml") if path.name != "base.yaml")


def explained(recipe: str, asked: str, *assignments: str) -> Explanation:
    params = load(ROOT / "recipes" / recipe, list(assignments))
    target = find_target(params, None, None, None, Path("nowhere"))
    return explain_params(params, target, params.stages, asked)


@pytest.mark.parametrize("recipe", RECIPES)
def test_totals_and_phases_are_the_plans(recipe: str) -> None:
    params = load(ROOT / "recipes" / recipe)
    target = find_target(params, None, None, None, Path("nowhere"))
    made = plan(params, target, params.stages)
    found = explain_params(params, target, params.stages, "")
    assert found.seconds == pytest.approx(made.total["seconds"])
    assert found.usd == pytest.approx(made.total["usd"]["expected"])
    assert found.peak_bytes == made.total["peak_bytes_per_gpu"]
    (sft,) = (stage for stage in made.stages if stage.stage == "sft")
    for phase in sft.phases:
        asked = explain_params(params, target, params.stages, f"sft.{phase.phase}")
        assert asked.peak_bytes == phase.peak_bytes
    assert [(each.stage, each.phase, each.seconds, each.usd) for each in found.phases] == [
        (stage.stage, phase.phase, phase.seconds, phase.usd) for stage in made.stages for phase in stage.phases
    ]


def test_resources_by_themselves_add_up_to_at_least_what_a_pass_on_one_device_takes() -> None:
    for setting in (sft(), sft(tuning="lora", quantisation="nf4"), sft(gpus=4, parallel="fsdp")):
        train = next(each for each in phases(setting) if each.name == "train")
        found = {each.name: each for each in resources(train.work, setting, "train")}
        assert found["matrix products"].amount == train.work.matmul_flops
        assert sum(each.seconds for each in found.values()) >= 0.999 * train.seconds
        assert max(each.seconds for each in found.values()) <= train.seconds
    assert ("collectives" in found) == (setting.gpus > 1)


def test_on_a_machine_that_was_timed_resources_take_the_pace_of_their_phase(tmp_path: Path) -> None:
    params = load(ROOT / "recipes" / "demo.yaml")

    def products(own: Machine) -> float:
        target = Target(device(own), own_price(0.1, "a test", "2026-11-23"), root=tmp_path)
        (phase,) = explain_params(params, target, params.stages, "ppo.update").phases
        return next(each.seconds for each in phase.resources if each.name == "matrix products")

    assert products(machine()) == pytest.approx(2 * products(machine(stages=())))


def test_unknown_parts_are_refused_with_the_known_ones() -> None:
    with pytest.raises(CostError, match=r"dpo is not a stage of this plan. Known: data, sft"):
        explained("demo.yaml", "dpo")
    with pytest.raises(CostError, match=r"decode is not a phase of sft. Known: start, train"):
        explained("demo.yaml", "sft.decode")


def test_a_stage_shows_its_memory_and_the_data_stage_has_no_device_work() -> None:
    found = explained("demo.yaml", "ppo")
    assert "policy" in found.memory
    data = explained("demo.yaml", "data")
    assert data.seconds > 0
    assert all(not phase.resources for phase in data.phases)
