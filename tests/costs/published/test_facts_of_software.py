"""What differs between software and its versions reaches the plan."""

from typing import Any

import pytest

from costs.formulas.kept import activation_bytes
from costs.formulas.memory import generating
from costs.formulas.states import base_weight_bytes
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


def row_of(setting: dict[str, Any], unit: str, value: float = 1.0) -> dict[str, Any]:
    return {
        "id": "r", "kind": "throughput", "tier": "A", "setting": setting,
        "measured": {"value": value, "unit": unit}, "source": {"title": "t"},
    }  # fmt: skip


def test_the_loss_of_a_fused_kernel_holds_logits_and_their_gradient_in_16_bit() -> None:
    pretrained = {
        "stage": "pretrain", "engine": "llm-foundry Composer FSDP FULL_SHARD", "model": "MPT-125m",
        "gpu": "A100-40GB", "gpus": 8, "micro_batch": 26, "seq_len": 2048, "dtype": "bf16",
        "flash_attention": True, "optimizer": "decoupled AdamW", "global_batch": 208,
    }  # fmt: skip
    setting = setting_of(pretrained)
    each = setting.loss.bytes_per_token(50_368, 26 * 2048, 2.0)
    assert each == 2 * 2 * 50_368
    assert cases(row_of(pretrained, "tokens/s per GPU"))[0].fits
    eager = pretrained | {"engine": "HF Trainer", "model": "llama-3.2-1b"}
    assert not cases(row_of(eager, "tokens/s per GPU"))[0].fits


@pytest.mark.parametrize("engine", ["vLLM", "lmdeploy turbomind", "TensorRT-LLM 0.6.1"])
def test_a_server_whose_cache_is_full_lets_requests_wait(engine: str) -> None:
    """64 sequences of 4,096 tokens would take 137 GB of cache."""
    served = SERVED | {"engine": engine, "model": "llama2-7b", "batch_size": 64,
                       "input_len": 2048, "output_len": 2048}  # fmt: skip
    assert cases(row_of(served, "output tokens/s"))[0].fits
    whole = served | {"engine": "HF transformers"}
    assert not cases(row_of(whole, "output tokens/s"))[0].fits
    # weights alone are too much
    assert not cases(row_of(served | {"gpu": "RTX3080-10GB"}, "output tokens/s"))[0].fits


def test_layers_of_a_model_that_generates_are_spread_over_devices() -> None:
    """Transformers' device_map holds one model on all devices, not one on each."""
    one = SERVED | {"model": "Qwen-72B", "batch_size": 1, "input_len": 1, "output_len": 2048}
    two = one | {"gpus": 2}
    assert not cases(row_of(one, "tokens/s"))[0].fits
    assert cases(row_of(two, "tokens/s"))[0].fits
    together = [cases(row_of(each, "GB sum over GPUs"))[0].planned for each in (one, two)]
    assert together[1] == together[0]


def test_of_roles_apart_it_is_not_known_whether_the_largest_fits() -> None:
    loop = {
        "stage": "ppo", "engine": "OpenRLHF", "actor": "Llama2-7B", "critic": "Llama2-7B",
        "gpu": "A800-SXM-80GB", "gpus": 8, "prompt_len": 1024, "gen_len": 1024,
        "micro_batch": 4, "rollout_batch": 1024, "train_batch": 128, "dtype": "bf16", "zero": 3,
        "reward_model": "Llama2-7B", "tuning": "full",
    }  # fmt: skip
    apart = loop | {"placement": "ref:reward:actor:critic 1:1:4:2"}
    known = [cases(row_of(each, "s per step"))[0].fits for each in (loop, apart)]
    assert known[0] is not None
    assert known[1] is None
