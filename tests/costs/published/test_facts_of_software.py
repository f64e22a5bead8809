"""What differs between software and its versions reaches the plan."""

from typing import Any

import pytest

from costs.formulas.memory import activation_bytes, base_weight_bytes, generating
from costs.published.grades import grade
from costs.published.measurements import cases
from costs.published.settings import planned_of, setting_of

TRAINED: dict[str, Any] = {
    "stage": "sft", "engine": "HF Trainer", "model": "Llama-3.1-8B", "gpu": "A100-80GB", "gpus": 1,
    "micro_batch": 2, "seq_len": 2048, "tuning": "lora", "lora_modules": "q,v", "dtype": "bf16",
    "lora_rank": 8, "grad_checkpointing": True,
}  # fmt: skip
SERVED: dict[str, Any] = {
    "stage": "inference", "engine": "HF transformers", "model": "Llama-3.1-8B",
    "gpu": "A100-80GB", "gpus": 1, "batch_size": 4, "input_len": 512, "output_len": 512,
    "dtype": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("date", "2023-11", "2025-02"),
        ("versions", "torch 2.1.1, flash_attn 2.3.4", "torch 2.6"),
        ("transformers", "4.36.2", "4.48"),
        ("date", "Sep 2023", "Jan 2025"),
    ],
)
def test_the_loss_is_that_of_the_version(key: str, old: str, new: str) -> None:
    assert setting_of(TRAINED | {key: old}).loss.name == "shifted"
    assert setting_of(TRAINED | {key: new}).loss.name == "whole"


def test_full_sharding_casts_when_it_gathers_and_autocast_keeps_a_wide_stream() -> None:
    row = TRAINED | {"tuning": "full", "dtype": "bf16 mixed", "lora_rank": None,
                     "lora_modules": None, "gpus": 8}  # fmt: skip
    cast = setting_of(row | {"parallelism": "FSDP"})
    wide = setting_of(row | {"parallelism": "DDP"})
    assert cast.levers.mixed
    assert wide.levers.mixed
    sizes = [activation_bytes(s, s.model, s.levers, 2, 2048) for s in (cast, wide)]
    # checkpoints of 2 and of 4 bytes
    assert sizes[1] > 1.8 * sizes[0]


def test_selective_checkpointing_is_by_operation_or_all_but_attention() -> None:
    row = TRAINED | {"tuning": "full", "lora_rank": None, "lora_modules": None,
                     "grad_checkpointing": "selective", "gpus": 8}  # fmt: skip
    titan = setting_of(row | {"engine": "torchtitan"})
    kept = activation_bytes(titan, titan.model, titan.levers, 1, 2048)
    m = titan.model
    # input, query, attention's and the layer's outputs, value, gate: 16 bit; four bytes a head
    layer = 2 * (4 * m.width + m.kv_width + m.mlp_width) + 4 * m.heads
    assert kept == pytest.approx(2048 * (32 * layer + 8 * m.width))
    megatron = setting_of(row | {"engine": "megatron", "gpus": 8})
    assert activation_bytes(megatron, m, megatron.levers, 1, 2048) > 1.5 * kept


def test_peft_widens_what_is_not_quantised() -> None:
    levers = setting_of(TRAINED | {"tuning": "qlora"}).levers
    shape = setting_of(TRAINED).model
    matrices = 32 * shape.layer_matrix_parameters
    beside = shape.parameters - matrices
    assert levers.wide_unquantised
    assert base_weight_bytes(shape, levers) > 4 * beside + 0.5 * matrices


def test_a_cache_that_grows_by_concatenation_is_held_twice_and_fp8_halves_it() -> None:
    def cache(**changes: Any) -> float:
        s = setting_of(SERVED | changes)
        return generating(s, s.model, s.levers, 4, 1024, 512)["kv_cache"]

    once = 2 * 32 * 1024 * 2 * 4 * 1024
    assert cache() == 2 * once
    assert cache(engine="vLLM") == once
    assert cache(engine="vLLM", kv_cache_dtype="fp8") == once / 2


def test_a_grade_b_is_inside_of_what_was_checked() -> None:
    row = {"setting": TRAINED, "measured": {"unit": "GiB peak", "value": 30.0}}
    inside = cases(row)[0]
    outside = cases(row | {"setting": TRAINED | {"gpu": "B200"}})[0]
    unstated = cases(row | {"setting": {k: v for k, v in TRAINED.items() if k != "engine"}})[0]
    assert grade(inside).letter == "B"
    assert grade(outside).letter == "C"
    assert grade(unstated).letter == "C"
    assert grade(inside).low < 1 < grade(inside).high


def test_hopper_is_planned_at_what_plain_pytorch_reaches() -> None:
    plain = planned_of(TRAINED | {"gpu": "H100-80GB"}).setting.efficiency
    own = planned_of(TRAINED | {"gpu": "H100-80GB", "engine": "NeMo"}).setting.efficiency
    assert plain.matmul < own.matmul
