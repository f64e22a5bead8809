"""Which variants there are for which params, and what each of them changes."""

from pathlib import Path

import pytest

from config.load import load
from config.schema import Params
from costs.levers.variants import BASELINE, OPTIMISED, Device, Variant, variants

CPU, AMX, GPU = Device(False, False), Device(False, True), Device(True, True)
DEMO = Path("recipes/demo.yaml")


def found(device: Device = CPU, *assignments: str, layers: int = 3) -> dict[str, Variant]:
    return {v.name: v for v in variants(load(DEMO, list(assignments)), device, layers)}


def test_every_lever_is_a_params_file_that_differs_from_the_baseline() -> None:
    all_of_them = found()
    assert next(iter(all_of_them)) == BASELINE
    for name, variant in all_of_them.items():
        same = name == BASELINE or variant.best_of or variant.missing
        assert variant.changes or same, name
        assert isinstance(variant.params, Params)
    assert all_of_them["lora"].changes["ppo.learning_rate"] == pytest.approx(3.0e-3)
    assert all_of_them["shared-base"].params.ppo.layout == "shared_base"  # type: ignore[union-attr]
    assert all_of_them["fsdp2-2"].changes == {
        "where.ppo.processes": 2,
        "where.ppo.sharding": "zero3",
    }
    assert all_of_them["small-reward"].changes == {"reward.layers": 2}


@pytest.mark.parametrize(
    ("device", "missing"), [(CPU, {"bf16", "fp16"}), (AMX, {"fp16"}), (GPU, set())]
)
def test_precisions_that_the_machine_emulates_are_not_here(
    device: Device, missing: set[str]
) -> None:
    named = {name for name, each in found(device).items() if "emulates" in each.missing}
    assert named == missing


def test_a_base_from_a_shape_is_never_quantised() -> None:
    assert found()["qlora"].missing == "a base built from model.random is never quantised"


def test_what_contradicts_the_params_has_the_reason() -> None:
    assert found(CPU, "ppo.rollout_engine=paged")["shared-trunk"].missing.startswith(
        "ppo.rollout_engine=paged computes no values"
    )
    assert found(CPU, "rloo=null")["rloo"].missing == "params.yaml has no section rloo"


def test_a_method_without_sampling_has_no_levers_of_the_loop() -> None:
    of_dpo = found(CPU, "align.method=dpo")
    assert {"ppo", "rloo", "grpo", "lora", "accumulation"} <= of_dpo.keys()
    assert not {"shared-trunk", "student", "fewer-updates"} & of_dpo.keys()
    assert of_dpo["accumulation"].changes == {"dpo.micro_batch_size": 16}
    assert of_dpo[BASELINE].stages == ("data", "sft", "dpo")


def test_stages_before_the_alignment_are_the_baselines_unless_their_section_changes() -> None:
    every = found(AMX)
    base = every[BASELINE].params
    assert every["bf16"].params_of("sft", base) is base
    assert every["bf16"].params_of("ppo", base) is every["bf16"].params
    assert every["small-reward"].params_of("reward", base) is every["small-reward"].params
    assert every["student"].own_stages == ("ppo", "distill")


def test_a_combination_that_is_another_variant_is_left_out() -> None:
    assert "trunk+fewer-passes" in found()
    assert "trunk+fewer-passes" not in found(CPU, "ppo.ppo_epochs=1")


def test_what_the_planner_would_choose_is_a_variant_if_it_differs() -> None:
    params = load(DEMO)
    chosen = load(DEMO, ["ppo.micro_batch_tokens=8192"])
    named = {each.name: each for each in variants(params, CPU, 3, chosen)}
    assert named[OPTIMISED].changes == {"ppo.micro_batch_tokens": 8192}
    assert OPTIMISED not in {each.name for each in variants(params, CPU, 3, params)}
