"""What `rlhf plan explain` shows is the plan's own: phases and resources."""

from pathlib import Path

import pytest

from config.errors import CostError
from config.load import load
from costs.planning.explain import Explanation, explain_params, resources
from costs.planning.phases import phases
from costs.planning.planner import plan
from costs.planning.target import find_target
from tests.conftest import ROOT
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
    planned = plan(params, target, params.stages)
    result = explain_params(params, target, params.stages, "")
    assert result.seconds == pytest.approx(planned.total["seconds"])
    assert result.usd == pytest.approx(planned.total["usd"]["expected"])
    assert result.peak_bytes == planned.total["peak_bytes_per_gpu"]
    (sft,) = (stage for stage in planned.stages if stage.stage == "sft")
    for phase in sft.phases:
        explained = explain_params(params, target, params.stages, f"sft.{phase.phase}")
        assert explained.peak_bytes == phase.peak_bytes
    assert [(phase.stage, phase.phase, phase.seconds, phase.usd) for phase in result.phases] == [
        (stage.stage, phase.phase, phase.seconds, phase.usd) for stage in planned.stages for phase in stage.phases
    ]


def test_resources_by_themselves_add_up_to_at_least_what_a_pass_on_one_device_takes() -> None:
    for setting in (sft(), sft(tuning="lora", quantisation="nf4"), sft(gpus=4, parallel="fsdp")):
        train = next(phase for phase in phases(setting) if phase.name == "train")
        result = {resource.name: resource for resource in resources(train.work, setting)}
        assert result["matrix products"].amount == train.work.matmul_flops
        assert sum(value.seconds for value in result.values()) >= 0.999 * train.seconds
        assert max(value.seconds for value in result.values()) <= train.seconds
    assert ("collectives" in result) == (setting.gpus > 1)


def test_unknown_parts_are_refused_with_the_known_ones() -> None:
    with pytest.raises(CostError, match=r"dpo is not a stage of this plan. Known: data, sft"):
        explained("demo.yaml", "dpo")
    with pytest.raises(CostError, match=r"decode is not a phase of sft. Known: start, train"):
        explained("demo.yaml", "sft.decode")


def test_a_stage_shows_its_memory_and_the_data_stage_has_no_device_work() -> None:
    result = explained("demo.yaml", "ppo")
    assert "policy" in result.memory
    data = explained("demo.yaml", "data")
    assert data.seconds > 0
    assert all(not phase.resources for phase in data.phases)
