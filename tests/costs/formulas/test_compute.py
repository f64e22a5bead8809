"""FLOPs against PyTorch's own counter and printed utilisations; bytes by hand."""

from dataclasses import replace
from typing import Any

import pytest

from costs.formulas.compute import (
    decode_step,
    forward_pass,
    gathered_bytes,
    micro_step,
    optimizer_step,
    paged_bytes,
)
from costs.formulas.counts import forward_attention_flops, forward_matmul_flops, mfu, training_flops
from costs.formulas.ppo import ppo_moments
from costs.formulas.setting import Levers
from costs.tables.catalogue import shape
from costs.tables.shapes import from_config
from tests.costs.settings import ALL_LINEAR, ppo, sft

FIELDS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "vocab_size": 500,
}


def counted(name: str, fields: dict[str, Any], tokens: int, backward: bool) -> tuple[int, Any]:
    """FLOPs that torch counts for one sequence, and the config."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(transformers, name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 500, (1, tokens))
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops(), config


@pytest.mark.parametrize("name", ["LlamaConfig", "PhiConfig", "GPTNeoXConfig"])
def test_forward_flops_are_those_that_torch_counts(name: str) -> None:
    total, config = counted(name, FIELDS, 48, backward=False)
    model = from_config(config.to_dict(), name)
    ours = forward_matmul_flops(model, 48) + forward_attention_flops(model, 1, 48, causal=False)
    # the counter also sees the outer product that makes the rotary angles: 2 x 48 x half a head's
    # width
    assert ours == pytest.approx(total, rel=1e-3)


def test_training_flops_are_those_that_torch_counts() -> None:
    total, config = counted("LlamaConfig", FIELDS, 48, backward=True)
    model = from_config(config.to_dict(), "llama")
    assert sum(training_flops(model, Levers(attention="eager"), 1, 48)) == pytest.approx(
        total * 1.0, rel=0.03
    )


def test_under_a_mask_the_scores_above_the_diagonal_are_computed_too() -> None:
    plain = sft(tokens=512, micro_batch=4)
    masked = replace(plain, workload=replace(plain.workload, masked=True, mean_tokens=500))
    one, other = (
        micro_step(setting, setting.model, setting.levers, 4, 512) for setting in (plain, masked)
    )
    assert other.attention_flops == 2 * one.attention_flops
    assert other.matmul_flops == one.matmul_flops
    passing = [
        forward_pass(setting, setting.model, setting.levers, 4, 512, 0.0)
        for setting in (plain, masked)
    ]
    assert passing[0] == passing[1]  # our own loops, which pad on the right, need none


def test_full_checkpointing_does_the_layers_once_more() -> None:
    model = shape("llama-7b")
    plain, again = (
        training_flops(model, Levers(checkpointing=how), 1, 2048)[0] for how in ("none", "full")
    )
    assert again - plain == forward_matmul_flops(model, 2048, 0)


def test_frozen_weights_need_no_gradient() -> None:
    model = shape("llama-7b")
    full, lora = (
        training_flops(model, Levers(), 1, 2048)[0],
        training_flops(model, Levers(tuning="lora", lora_rank=8), 1, 2048)[0],
    )
    assert lora / full == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("width", "layers", "heads", "sequence", "tokens_per_second", "printed"),
    [
        (4096, 32, 32, 2048, 3679, 0.5092),
        (2048, 24, 16, 16384, 9715, 0.5523),
        (768, 12, 12, 2048, 136334, 0.4275),
        (8192, 80, 64, 2048, 376, 0.4891),
    ],
)
def test_utilisation_is_as_llm_foundry_prints_it(
    width: int, layers: int, heads: int, sequence: int, tokens_per_second: float, printed: float
) -> None:
    # llm-foundry scripts/train/benchmarking/README.md, A100-40GB table: MPT shapes with learned
    # positions, which ours have not
    config = {
        "model_type": "mpt",
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "vocab_size": 50368,
    }
    assert mfu(from_config(config, "mpt"), tokens_per_second, sequence, 312e12) == pytest.approx(
        printed, rel=0.02
    )


def test_a_decoding_step_reads_every_weight_and_the_cache_once() -> None:
    setting = sft("llama-7b", tuning="frozen")
    model = setting.model
    step = decode_step(setting, model, setting.levers, 1, 1000)
    assert step.weight_bytes == 2 * (
        model.layers * model.layer_matrix_parameters + model.vocab * model.width
    )
    more = decode_step(setting, model, setting.levers, 1, 2000)
    assert more.bytes_moved - step.bytes_moved == 1000 * 2**19
    assert step.matmul_flops == 2 * (
        model.layers * model.layer_matrix_parameters + model.vocab * model.width
    )


def test_fsdp_gathers_the_weights_twice_and_data_parallel_does_not() -> None:
    plain, sharded = sft("llama-7b", gpus=8), sft("llama-7b", gpus=8, parallel="fsdp")
    model = plain.model
    assert gathered_bytes(plain, model, plain.levers) == 0
    assert gathered_bytes(sharded, model, sharded.levers) == pytest.approx(
        2 * 2 * model.parameters * 7 / 8
    )


def test_data_parallel_reduces_twice_the_gradients_and_sharding_once() -> None:
    # arXiv 1910.02054 section 7: 2 psi for data parallel, psi for the reduce-scatter of ZeRO-2
    plain, sharded = sft("llama-7b", gpus=8), sft("llama-7b", gpus=8, parallel="zero2")
    sent = [
        optimizer_step(each, each.model, each.levers).communicated_bytes
        for each in (plain, sharded)
    ]
    assert sent[0] == 2 * sent[1] == pytest.approx(2 * 2 * plain.model.parameters * 7 / 8)


def test_a_paged_optimizer_moves_what_does_not_fit() -> None:
    small = sft("llama-7b", device="rtx4090", optimizer="paged_adamw")
    large = sft("llama-7b", device="h200", optimizer="paged_adamw")
    state = 2 * 4 * small.model.parameters
    free = small.hardware.usable_bytes - 2 * small.model.parameters
    assert paged_bytes(small, small.model, small.levers) == pytest.approx(2 * (state - free))
    assert paged_bytes(large, large.model, large.levers) == 0


def test_adapters_add_six_flops_a_parameter_and_token() -> None:
    model = shape("llama-7b")
    levers = Levers(tuning="lora", lora_rank=64, lora_modules=ALL_LINEAR)
    bare = 2 * forward_matmul_flops(model, 100)
    assert training_flops(model, levers, 1, 100)[0] - bare == 6 * 159_907_840 * 100


def test_the_phases_of_the_loop_hold_logits_where_they_read_words_and_nowhere_else() -> None:
    setting = ppo()
    assert setting.rlhf is not None
    again = replace(setting, rlhf=replace(setting.rlhf, rescored=16))
    held = {moment.phase: moment.roles for moment in ppo_moments(again)}
    assert "logprobs" not in {moment.phase for moment in ppo_moments(setting)}
    assert held["logprobs"]["policy"]["logits"] > 0
    assert held["reference"]["ref"]["logits"] > 0
    assert held["score"]["reward"].get("logits", 0.0) == 0.0
    assert held["value"]["value"].get("logits", 0.0) == 0.0


def test_the_states_of_every_role_stay_through_all_phases() -> None:
    setting = ppo()
    parameters = setting.model.parameters
    for moment in ppo_moments(setting):
        for role in ("policy", "value"):
            assert moment.roles[role]["optimizer"] > parameters, (moment.phase, role)
        assert moment.roles["reward"].get("optimizer", 0.0) == 0.0
