"""The moments of a training step by hand: which gradients are there beside which activations."""

from typing import Any

import pytest

from costs.formulas.kept import activation_bytes, recomputed_bytes
from costs.formulas.setting import Setting
from costs.formulas.states import weights
from costs.formulas.timeline import head_gradient, loading_moment, logits_bytes, training_moments
from tests.costs.settings import small, small_setting

ALL, TABLE = 4700, 1010
LOGITS = 14 * 101
"""Bytes of the streamed loss a token, all of whose logits fit in one chunk."""
LORA: dict[str, Any] = {"tuning": "lora", "lora_rank": 2, "lora_modules": ("q", "down")}
ADAPTERS = 3 * 2 * (22 + 27)


def step(setting: Setting, *chosen: Any) -> dict[str, dict[str, float]]:
    """Moment -> what is held beside weights and optimizer."""
    result = training_moments(setting, setting.model, setting.levers, *chosen)
    assert [moment.phase.partition(":")[0] for moment in result] == ["train"] * 4
    for moment in result:
        assert set(moment.roles) == {"policy"}
    held = result[0].roles["policy"]["weights"]
    assert held == weights(setting, setting.model, setting.levers)
    return {
        moment.phase.partition(":")[2]: {
            part: size for part, size in moment.roles["policy"].items() if part not in ("weights", "optimizer")
        }
        for moment in result
    }


def kept(setting: Setting, sequences: float = 3) -> float:
    return activation_bytes(setting, setting.model, setting.levers, sequences, 8)


def used(setting: Setting, sequences: float = 3) -> float:
    return recomputed_bytes(setting, setting.model, setting.levers, sequences, 8)


def test_without_accumulation_gradients_come_as_activations_go() -> None:
    setting = small_setting(micro_batch=3)
    assert step(setting) == {
        # the streamed loss meets the head's gradient while its logits are there
        "loss": {"activations": kept(setting), "logits": 24 * LOGITS, "gradients": 2 * TABLE},
        "backward": {"activations": kept(setting) + used(setting), "gradients": 2 * TABLE},
        "backward_end": {"gradients": 2 * ALL},
        "step": {"gradients": 2 * ALL},
    }


def test_the_states_are_there_at_every_moment() -> None:
    setting = small_setting(micro_batch=3)
    for moment in training_moments(setting, setting.model, setting.levers, "update", "value"):
        assert moment.phase.startswith("update:")
        assert moment.roles["value"]["optimizer"] == 2 * 2 * ALL


def test_accumulated_gradients_are_there_from_the_start() -> None:
    setting = small_setting(micro_batch=3, accumulation=2)
    assert step(setting) == {
        "loss": {"activations": kept(setting), "logits": 24 * LOGITS, "gradients": 2 * ALL + 2 * TABLE},
        "backward": {"activations": kept(setting) + used(setting), "gradients": 2 * ALL},
        # the last table's gradient, before it is added
        "backward_end": {"gradients": 2 * ALL + 2 * TABLE},
        "step": {"gradients": 2 * ALL},
    }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_head_of_a_tied_table_waits_for_the_embedding(accumulation: int) -> None:
    setting = small_setting(model=small(tied=True), accumulation=accumulation)
    layer_bytes = 2 * (ALL - TABLE)
    result = step(setting)
    before, new = (layer_bytes, 2 * TABLE) if accumulation == 2 else (0, 0)
    assert result["loss"]["gradients"] == before + 2 * TABLE
    assert result["backward"]["gradients"] == before + 2 * TABLE
    assert result["backward_end"]["gradients"] == layer_bytes + 2 * TABLE + new
    assert result["step"]["gradients"] == layer_bytes


def test_a_loss_that_is_whole_has_no_gradient_of_the_head_beside_it() -> None:
    setting = small_setting(software="transformers")
    result = step(setting)
    assert result["loss"] == {"activations": kept(setting, 1), "logits": 8 * LOGITS}
    assert result["backward"]["gradients"] == 2 * TABLE


def test_a_scalar_head_has_neither_logits_nor_a_large_gradient() -> None:
    setting = small_setting()
    result = step(setting, "train", "policy", False)
    assert result["loss"] == {"activations": kept(setting, 1)}
    assert result["backward"] == {"activations": kept(setting, 1) + used(setting, 1)}
    assert result["backward_end"] == result["step"] == {"gradients": 2 * ALL}
    # the embedding's gradient is still as large as the table
    twice = step(small_setting(accumulation=2), "train", "policy", False)
    assert twice["loss"]["gradients"] == twice["backward"]["gradients"] == 2 * ALL
    assert twice["backward_end"]["gradients"] == 2 * ALL + 2 * TABLE


def test_recomputed_layers_are_there_until_the_last_is_done() -> None:
    setting = small_setting(checkpointing="full")
    result = step(setting)
    assert result["backward_end"]["activations"] == used(setting, 1)
    assert result["backward"]["activations"] == kept(setting, 1) + used(setting, 1)
    assert "activations" not in result["step"]


def test_a_budget_of_tokens_takes_the_place_of_a_micro_batch() -> None:
    setting = small_setting({"micro_batch_tokens": 20.0}, micro_batch=7)
    result = step(setting)
    assert result["loss"]["activations"] == pytest.approx(kept(setting, 2.5))
    assert result["loss"]["logits"] == 20 * LOGITS


def test_adapters_have_their_own_gradients_and_unpack_quantised_weights() -> None:
    setting = small_setting(quantisation="nf4", **LORA)
    result = step(setting)
    assert result["loss"] == {"activations": kept(setting, 1), "logits": 8 * LOGITS}
    assert result["backward"]["workspace"] == result["backward_end"]["workspace"] == 680
    assert "gradients" not in result["backward"]
    assert result["step"] == {"gradients": 4 * ADAPTERS}


@pytest.mark.parametrize(
    ("chosen", "copied"),
    [
        ({}, 2 * ALL),
        ({"weights_fp32": True}, 4 * ALL),
        ({"gpus": 4}, 2 * ALL + 2 * ALL),  # and the buckets
        ({"gpus": 4, "parallel": "zero1"}, 2 * ALL / 4),
        ({"gpus": 1, "parallel": "zero1"}, 2 * ALL),
        (LORA, 2 * ADAPTERS),
    ],
)
def test_an_unfused_optimizer_makes_copies_of_its_share(chosen: dict[str, Any], copied: float) -> None:
    result = step(small_setting(software="transformers-2022", **chosen))
    assert result["step"]["workspace"] == pytest.approx(copied)


@pytest.mark.parametrize(("chosen", "table"), [({}, 2 * TABLE), ({"weights_fp32": True}, 4 * TABLE), (LORA, 0.0)])
def test_the_heads_gradient_is_as_large_as_its_table(chosen: dict[str, Any], table: float) -> None:
    setting = small_setting(**chosen)
    assert head_gradient(setting.model, setting.levers) == table


def logits(work: dict[str, Any] | None = None, **chosen: Any) -> float:
    setting = small_setting(work, **chosen)
    return logits_bytes(setting, setting.model, setting.levers)


def test_logits_of_a_micro_batch_by_hand() -> None:
    assert logits() == 8 * LOGITS
    assert logits(micro_batch=3) == 24 * LOGITS
    assert logits({"loss_tokens": 0.25}) == 2 * LOGITS
    assert logits({"micro_batch_tokens": 20.0}) == 20 * LOGITS
    assert logits(dtype="fp32") == pytest.approx(8 * 12 * 101)
    # compiled, a chunk is never upcast
    assert logits(software="unsloth") == 8 * 4 * 101
    # on a host, a fused head is written out: 33 bytes a logit
    fused = {"loss": "fused", "dtype": "fp32"}
    assert logits(device="cpu", **fused) == pytest.approx(8 * 33 * 101)
    assert logits(device="a100-80", **fused) == pytest.approx(8 * 12 / 7 * 101)


@pytest.mark.parametrize(
    ("chosen", "whole"),
    [
        ({"software": "litgpt", "parallel": "fsdp", "gpus": 2}, 2 * ALL),
        ({"software": "litgpt", "parallel": "zero3", "gpus": 4}, 2 * ALL),
        ({"software": "litgpt", "parallel": "fsdp", "gpus": 2, "weights_fp32": True}, 4 * ALL),
        ({"software": "litgpt", "parallel": "zero2", "gpus": 4}, 0.0),
        ({"software": "litgpt", "parallel": "fsdp"}, 0.0),
        ({"parallel": "fsdp", "gpus": 2}, 0.0),
    ],
)
def test_some_software_holds_the_whole_model_while_it_is_sharded(chosen: dict[str, Any], whole: float) -> None:
    setting = small_setting(**chosen)
    moment = loading_moment(setting, setting.model, setting.levers)
    assert moment.phase == "load"
    assert moment.roles == {"policy": {"weights": weights(setting, setting.model, setting.levers), "workspace": whole}}
