"""What differs between software and its versions reaches the plan."""

from typing import Any

import pytest

from benchmarks.published.measurements import Case, cases
from benchmarks.published.row import read_row
from benchmarks.published.settings import planned_of
from costs.formulas.compute import decode_step
from costs.formulas.kept import activation_bytes
from costs.formulas.memory import generating
from costs.formulas.setting import Setting
from costs.formulas.states import base_weight_bytes
from costs.formulas.time import matmul_rate

TRAINED: dict[str, Any] = {
    "stage": "sft", "engine": "transformers", "model": "llama-3-8b", "device": "a100-80",
    "gpus": 1, "micro_batch": 2, "max_tokens": 2048, "tuning": "lora", "lora_modules": ["q", "v"],
    "dtype": "bf16", "lora_rank": 8, "recomputation": "full",
}  # fmt: skip
FULL = {key: value for key, value in TRAINED.items() if not key.startswith("lora")} | {
    "tuning": "full", "gpus": 8,
}  # fmt: skip
SERVED: dict[str, Any] = {
    "stage": "generate", "engine": "transformers", "model": "llama-3-8b", "device": "a100-80",
    "gpus": 1, "micro_batch": 4, "prompt_tokens": 512, "response_tokens": 512, "dtype": "bf16",
}  # fmt: skip
RATE = {"quantity": "throughput", "value": 1.0, "unit": "1/s", "per": "token"}


def case(run: dict[str, Any], measured: dict[str, Any] = RATE) -> Case:
    return cases(read_row({"id": "r", "source": "s", "run": run, "measured": [measured]}))[0]


def setting_of(run: dict[str, Any]) -> Setting:
    row = {"id": "r", "source": "s", "run": run, "measured": [RATE]}
    return planned_of(read_row(row).run).setting


def test_the_loss_is_that_of_the_version() -> None:
    assert setting_of(TRAINED | {"released": "2023-11"}).loss.name == "shifted"
    assert setting_of(TRAINED | {"released": "2025-01"}).loss.name == "dense"


def test_full_sharding_casts_when_it_gathers_and_autocast_keeps_a_wide_stream() -> None:
    row = FULL | {"trained_weights": "fp32"}
    cast, wide = setting_of(row | {"sharding": "fsdp"}), setting_of(row | {"sharding": "ddp"})
    assert cast.levers.mixed
    assert wide.levers.mixed
    sizes = [activation_bytes(s, s.model, s.levers, 2, 2048) for s in (cast, wide)]
    # checkpoints of 2 and of 4 bytes
    assert sizes[1] > 1.8 * sizes[0]


def test_selective_checkpointing_is_by_operation_or_all_but_attention() -> None:
    row = FULL | {"recomputation": "selective"}
    titan = setting_of(row | {"engine": "torchtitan"})
    kept = activation_bytes(titan, titan.model, titan.levers, 1, 2048)
    m = titan.model
    # input, query, attention's and the layer's outputs, value, gate: 16 bit; four bytes a head
    layer = 2 * (4 * m.width + m.kv_width + m.mlp_width) + 4 * m.heads
    assert kept == pytest.approx(2048 * (32 * layer + 8 * m.width))
    megatron = setting_of(row | {"engine": "megatron"})
    assert activation_bytes(megatron, m, megatron.levers, 1, 2048) > 1.5 * kept


def test_peft_widens_what_is_not_quantised() -> None:
    levers = setting_of(TRAINED | {"quantisation": "nf4-dq"}).levers
    shape = setting_of(TRAINED).model
    matrices = 32 * shape.layer_matrix_parameters
    beside = shape.parameters - matrices
    assert levers.wide_unquantised
    assert base_weight_bytes(shape, levers) > 4 * beside + 0.5 * matrices


def test_a_base_that_is_loaded_in_fp32_stays_so_under_lora() -> None:
    plain, wide = setting_of(TRAINED), setting_of(TRAINED | {"trained_weights": "fp32"})
    sizes = [base_weight_bytes(s.model, s.levers) for s in (plain, wide)]
    assert sizes[1] == 2 * sizes[0]


def test_a_cache_that_grows_by_concatenation_is_held_twice_and_fp8_halves_it() -> None:
    def cache(**changes: Any) -> float:
        s = setting_of(SERVED | changes)
        return generating(s, s.model, s.levers, 4, 1024, 512)["kv_cache"]

    once = 2 * 32 * 1024 * 2 * 4 * 1024
    assert cache() == 2 * once
    assert cache(engine="vllm") == once
    assert cache(engine="vllm", kv_cache="fp8") == once / 2


def test_prompts_were_read_with_all_their_logits_before_4_45() -> None:
    def logits(**changes: Any) -> float:
        s = setting_of(SERVED | changes)
        return generating(s, s.model, s.levers, 4, 1024, 512)["logits"]

    assert logits(released="2023-11") > 100 * logits(released="2025-01")


def test_a_growing_cache_is_copied_and_repeated_for_grouped_queries() -> None:
    def moved(**changes: Any) -> float:
        s = setting_of(SERVED | changes)
        return decode_step(s, s.model, s.levers, 4.0, 1024.0).bytes_moved

    cache = 2 * 32 * 1024 * 2 * 4 * 1024  # of 8 heads for the keys of 32
    plain = moved(engine="pytorch-fsdp")
    assert moved() - plain == pytest.approx((3 + 2 * 4 - 1) * cache)
    heads = 4 * cache
    whole = moved(model="llama-7b") - moved(model="llama-7b", engine="pytorch-fsdp")
    assert whole == pytest.approx(2 * heads)


def test_dpo_reads_its_reference_unless_it_has_none() -> None:
    pairs = FULL | {"stage": "dpo", "gpus": 1, "recomputation": "none"}
    step = {"quantity": "time", "unit": "s", "per": "step", "value": 1.0}
    memory = {"quantity": "memory", "unit": "GiB", "value": 1.0}
    for measured, more in ((step, 1.2), (memory, 1.1)):
        both, alone = (float(case(pairs | changes, measured).planned)
                       for changes in ({}, {"ref_model": False}))  # fmt: skip
        assert both > more * alone


def test_hopper_is_planned_at_what_plain_pytorch_reaches() -> None:
    plain, own, older = (
        matmul_rate(setting_of(TRAINED | changes))
        for changes in (
            {"device": "h100-80"}, {"device": "h100-80", "engine": "megatron"}, {},
        )
    )  # fmt: skip
    assert older < plain < 0.9 * own


def test_the_loss_of_a_fused_kernel_holds_logits_and_their_gradient_in_16_bit() -> None:
    pretrained = {
        "stage": "pretrain", "engine": "llm-foundry", "model": "mpt-125m", "device": "a100-40",
        "gpus": 8, "micro_batch": 26, "max_tokens": 2048, "dtype": "bf16", "attention": "flash",
        "global_batch": 208.0,
    }  # fmt: skip
    setting = setting_of(pretrained)
    each = setting.loss.bytes_per_token(50_368, 26 * 2048, 2.0)
    assert each == 2 * 2 * 50_368
    assert case(pretrained).fits
    assert not case(pretrained | {"engine": "transformers", "model": "llama-3.2-1b"}).fits


@pytest.mark.parametrize("engine", ["vllm", "lmdeploy", "tensorrt-llm"])
def test_a_server_whose_cache_is_full_lets_requests_wait(engine: str) -> None:
    """64 sequences of 4,096 tokens would take 137 GB of cache."""
    served = SERVED | {"engine": engine, "model": "llama-7b", "micro_batch": 64,
                       "prompt_tokens": 2048, "response_tokens": 2048}  # fmt: skip
    assert case(served).fits
    assert not case(served | {"engine": "transformers"}).fits
    # weights alone are too much
    assert not case(served | {"device": "l4", "model": "llama-2-13b"}).fits


def test_layers_of_a_model_that_generates_are_spread_over_devices() -> None:
    """Transformers' device_map holds one model on all devices, not one on each."""
    one = SERVED | {"model": "qwen-72b", "micro_batch": 1, "prompt_tokens": 1}
    two = one | {"gpus": 2}
    assert not case(one).fits
    assert case(two).fits
    memory = {"quantity": "memory", "unit": "GB", "value": 1.0, "all_gpus": True}
    assert case(two, memory).planned == case(one, memory).planned


def test_of_roles_apart_it_is_not_known_whether_the_largest_fits() -> None:
    loop = {
        "stage": "ppo", "engine": "openrlhf", "model": "llama-7b", "value_model": "llama-7b",
        "device": "a800-80", "gpus": 8, "prompt_tokens": 1024, "response_tokens": 1024,
        "micro_batch": 4, "rollout_batch": 1024, "mini_batch": 128, "dtype": "bf16",
        "sharding": "zero3", "reward_model": "llama-7b", "tuning": "full",
    }  # fmt: skip
    step = {"quantity": "time", "unit": "s", "per": "step", "value": 1.0}
    apart = loop | {"roles": {"ref": 1, "reward": 1, "policy": 4, "value": 2}}
    assert case(loop, step).fits is not None
    assert case(apart, step).fits is None
