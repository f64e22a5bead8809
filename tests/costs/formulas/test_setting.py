"""What a setting refuses, and what it derives from its levers and its work."""

from dataclasses import replace
from typing import Any

import pytest

from config.errors import CostError
from costs.formulas.setting import QUANT_BYTES, Levers
from tests.costs.settings import sft, small_setting


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuning": "x"}, "tuning='x' is not one of full, lora, frozen"),
        ({"parallel": "x"}, "parallel='x' is not one of ddp, zero1, zero2, zero3, fsdp"),
        ({"optimizer": "x"}, "optimizer='x' is not one of adamw, adamw8bit"),
        ({"checkpointing": "x"}, "checkpointing='x' is not one of none, full"),
        ({"attention": "x"}, "attention='x' is not one of flash, sdpa, eager"),
    ],
)
def test_a_word_that_is_not_known_names_those_that_are(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CostError) as error:
        Levers(**changes)
    assert str(error.value) == f"{said}. Change it in the setting."


def test_a_type_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(CostError, match="dtype='fp8' is not one of fp32, tf32, bf16, fp16"):
        Levers(dtype="fp8")
    with pytest.raises(CostError, match="quantisation='int2' is not one of int8, nf4, nf4-dq, int4"):
        Levers(quantisation="int2")


@pytest.mark.parametrize("name", ["micro_batch", "accumulation", "lora_rank"])
def test_numbers_are_at_least_one(name: str) -> None:
    changes: dict[str, Any] = {name: 0}
    with pytest.raises(CostError, match="must all be at least 1"):
        Levers(**changes)
    changes[name] = 1
    Levers(**changes)


def test_devices_are_at_least_one() -> None:
    with pytest.raises(CostError, match="gpus=0 must be at least 1"):
        sft(gpus=0)


def test_bytes_of_weights_by_type() -> None:
    assert [Levers(dtype=name).dtype_bytes for name in ("fp32", "tf32", "bf16", "fp16")] == [4, 4, 2, 2]
    assert Levers(weights_fp32=True).weight_bytes == 4
    assert (Levers(weights_fp32=True).mixed, Levers().mixed) == (True, False)
    assert not Levers(weights_fp32=True, dtype="fp32").mixed
    # NF4: an fp32 scale in 64 weights; doubly quantised, 8 bits and an fp32 in 256 of those
    assert QUANT_BYTES["nf4"] == 36 / 64
    assert QUANT_BYTES["nf4-dq"] == (32 + 1 + 4 / 256) / 64
    assert QUANT_BYTES["int4"] == (16 + 4) / 32


def test_another_micro_batch_takes_the_place_of_a_budget_of_tokens() -> None:
    budget = small_setting({"micro_batch_tokens": 20.0}, micro_batch=3)
    assert budget.micro_batch_tokens == 20
    other = budget.with_levers(optimizer="adamw8bit")
    assert (other.micro_batch_tokens, other.levers.optimizer) == (20, "adamw8bit")
    assert budget.with_levers(micro_batch=5).micro_batch_tokens == 5 * 8


@pytest.mark.parametrize(
    ("work", "levers", "mask"),
    [
        ({}, {}, True),
        ({"masked": False}, {}, False),
        ({"mean_tokens": 8.0}, {}, False),
        ({}, {"attention": "flash"}, False),
        ({}, {"attention": "eager"}, False),
        ({}, {"micro_batch": 1}, False),
    ],
)
def test_a_mask_is_a_tensor_where_padding_differs(work: dict[str, Any], levers: dict[str, Any], mask: bool) -> None:
    padded = {"masked": True, "mean_tokens": 7.0}
    assert small_setting(padded | work, **({"micro_batch": 2} | levers)).mask_tensor is mask


def test_a_loss_that_is_named_goes_before_the_engines() -> None:
    setting = sft()
    assert setting.loss.name == "streamed"
    assert replace(setting, levers=Levers(loss="dense")).loss.name == "dense"
