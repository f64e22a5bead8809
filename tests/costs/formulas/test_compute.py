"""FLOPs against PyTorch's own counter and printed utilisations; bytes by hand."""

from dataclasses import replace
from typing import Any

import pytest

from costs.formulas.compute import (
    Work,
    decode_step,
    forward_pass,
    micro_communication,
    micro_step,
    optimizer_step,
    paged_bytes,
)
from costs.formulas.counts import experts_read, forward_attention_flops, forward_matmul_flops, mfu, training_flops
from costs.formulas.ppo_memory import ppo_moments
from costs.formulas.setting import Levers
from costs.tables.catalogue import shape
from costs.tables.shapes import from_config
from tests.costs.settings import ALL_LINEAR, ppo, sft, small_mixture, small_setting

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
    # the counter also sees the outer product that makes the rotary angles: 2 x 48 x half a head's width
    assert ours == pytest.approx(total, rel=1e-3)


def test_training_flops_are_those_that_torch_counts() -> None:
    total, config = counted("LlamaConfig", FIELDS, 48, backward=True)
    model = from_config(config.to_dict(), "llama")
    assert sum(training_flops(model, Levers(attention="eager"), 1, 48)) == pytest.approx(total * 1.0, rel=0.03)


def test_attention_alone_sees_tokens_that_sequences_share_in_each_of_them() -> None:
    plain = sft(tokens=512, micro_batch=4)
    shared = replace(plain, workload=replace(plain.workload, attention_places=1.5))
    for first, other in (
        [micro_step(item, item.model, item.levers, 4, 512) for item in (plain, shared)],
        [forward_pass(item, item.model, item.levers, 4, 512, 0.0) for item in (plain, shared)],
    ):
        assert other.attention_flops == pytest.approx(1.5**2 * first.attention_flops)
        assert other.matmul_flops == first.matmul_flops
        assert other.bytes_moved > first.bytes_moved


def test_under_a_mask_the_scores_above_the_diagonal_are_computed_too() -> None:
    plain = sft(tokens=512, micro_batch=4)
    masked = replace(plain, workload=replace(plain.workload, masked=True, mean_tokens=500))
    first, other = (micro_step(setting, setting.model, setting.levers, 4, 512) for setting in (plain, masked))
    assert other.attention_flops == 2 * first.attention_flops
    assert other.matmul_flops == first.matmul_flops
    passing = [forward_pass(setting, setting.model, setting.levers, 4, 512, 0.0) for setting in (plain, masked)]
    assert passing[0] == passing[1]  # our own loops, which pad on the right, need none


def test_full_checkpointing_does_the_layers_once_more() -> None:
    model = shape("llama-7b")
    plain, again = (training_flops(model, Levers(checkpointing=how), 1, 2048)[0] for how in ("none", "full"))
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
    # llm-foundry scripts/train/benchmarking/README.md, A100-40GB table: MPT shapes with learned positions, which ours
    # have not
    config = {"model_type": "mpt", "d_model": width, "n_layers": layers, "n_heads": heads, "vocab_size": 50368}
    assert mfu(from_config(config, "mpt"), tokens_per_second, sequence, 312e12) == pytest.approx(printed, rel=0.02)


def test_a_decoding_step_reads_every_weight_and_the_cache_once() -> None:
    setting = sft("llama-7b", tuning="frozen")
    model = setting.model
    step = decode_step(setting, model, setting.levers, 1, 1000)
    assert step.weight_bytes == 2 * (model.layers * model.layer_matrix_parameters + model.vocab * model.width)
    more = decode_step(setting, model, setting.levers, 1, 2000)
    assert more.bytes_moved - step.bytes_moved == 1000 * 2**19
    assert step.matmul_flops == 2 * (model.layers * model.layer_matrix_parameters + model.vocab * model.width)


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


# ---------------------------------------------------------------- by hand: three layers of 870 weights, a head of
# 1,010, two sequences of five tokens, half of them with a loss

LAYERS, HEAD, ALL = 3 * 870, 1010, 4700
STREAMS = 3 * 10 * 2 * (24 * 10 + 6 * 17)
LOGITS = 14 * 101 * 5
SCORES = 3 * 2 * 4 * 12 * 25
OPERATIONS = 3 * 45 + 20
READ = {"loss_tokens": 0.5, "read_tokens": 0.4}
"""Six of ten tokens are read by nobody: the last layer's 510 feed-forward weights skip them."""
SPARED = 6 * 2 * (12 * 10 + 6 * 17)


def trained(vocabulary: bool = True, **chosen: Any) -> Work:
    setting = small_setting(READ, **chosen)
    return micro_step(setting, setting.model, setting.levers, 2, 5, vocabulary)


AGAIN = 2 * 5 * HEAD
"""The streamed loss makes its logits once more in the backward pass."""
FULL = Work(
    matmul_flops=3 * 2 * (10 * LAYERS + 5 * HEAD - 6 * 510) + AGAIN,
    attention_flops=SCORES / 2 * 3.5,
    bytes_moved=3 * (STREAMS - SPARED) + 2 * LOGITS,
    weight_bytes=3 * 2 * (LAYERS + HEAD),
    operations=2.8 * OPERATIONS,
)


@pytest.mark.parametrize(
    ("chosen", "work"),
    [
        ({}, FULL),
        (
            {"vocabulary": False},
            FULL._replace(matmul_flops=3 * 2 * (10 * LAYERS - 6 * 510), bytes_moved=3 * (STREAMS - SPARED)),
        ),
        (
            {"checkpointing": "full"},
            FULL._replace(
                matmul_flops=4 * 2 * (10 * LAYERS - 6 * 510) + 3 * 2 * 5 * HEAD + AGAIN,
                attention_flops=SCORES / 2 * 4.5,
                bytes_moved=4 * (STREAMS - SPARED) + 2 * LOGITS,
                operations=3.8 * OPERATIONS,
            ),
        ),
        (
            # 28 bytes a score forward and 38 backward; last layers stay whole
            {"attention": "eager"},
            FULL._replace(
                matmul_flops=3 * 2 * (10 * LAYERS + 5 * HEAD) + AGAIN,
                attention_flops=SCORES * 3,
                bytes_moved=3 * STREAMS + 3 * 4 * 2 * 25 * (28 + 38) + 2 * LOGITS,
            ),
        ),
        (
            {"parallel": "zero3", "gpus": 4},
            # two gathers and a reduction, of three layers and the rest
            FULL._replace(communicated_bytes=3 * ALL * 2 * 3 / 4, messages=3 * 4),
        ),
        ({"parallel": "zero3"}, FULL),
        ({"parallel": "zero2", "gpus": 4}, FULL._replace(communicated_bytes=2 * ALL * 2 * 3 / 4, messages=2 * 4)),
    ],
)
def test_a_training_pass_by_hand(chosen: dict[str, Any], work: Work) -> None:
    assert trained(**chosen) == pytest.approx(work)


def test_a_layer_that_is_recomputed_is_gathered_for_it_and_its_backward_pass_at_once() -> None:
    # two processes over gloo gathered as often with checkpointing as without
    assert trained(parallel="zero3", gpus=4, checkpointing="full").messages == 3 * 4


def test_frozen_4_bit_weights_are_read_twice_and_unpacked_as_often() -> None:
    once = LAYERS * (0.5625 + 2)
    plain = trained(tuning="lora", quantisation="nf4")
    assert plain.weight_bytes == 2 * 0.5625 * (LAYERS + HEAD)
    assert plain.dequantised_bytes == 2 * once
    again = trained(tuning="lora", quantisation="nf4", checkpointing="full")
    assert again.dequantised_bytes == 3 * once


PASSED = Work(
    matmul_flops=2 * (10 * LAYERS + 4 * HEAD - 6 * 510),
    attention_flops=SCORES / 2,
    bytes_moved=STREAMS - SPARED + 14 * 101 * 4,
    weight_bytes=2 * (LAYERS + HEAD),
    operations=OPERATIONS,
)


@pytest.mark.parametrize(
    ("chosen", "work"),
    [
        ({}, PASSED),
        ({"checkpointing": "full"}, PASSED),
        (
            {"attention": "eager"},
            PASSED._replace(
                matmul_flops=2 * (10 * LAYERS + 4 * HEAD),
                attention_flops=SCORES,
                bytes_moved=STREAMS + 3 * 4 * 2 * 25 * 28 + 14 * 101 * 4,
            ),
        ),
        ({"parallel": "fsdp", "gpus": 4}, PASSED),  # gathered once for all passes of a phase
    ],
)
def test_a_pass_without_gradient_by_hand(chosen: dict[str, Any], work: Work) -> None:
    setting = small_setting(READ, **chosen)
    assert forward_pass(setting, setting.model, setting.levers, 2, 5, 4) == pytest.approx(work)


def test_a_pass_over_quantised_weights_unpacks_them_once() -> None:
    setting = small_setting(tuning="lora", quantisation="nf4")
    work = forward_pass(setting, setting.model, setting.levers, 2, 5, 4)
    assert work.dequantised_bytes == LAYERS * (0.5625 + 2)
    assert work.operations == OPERATIONS + 3 * (2 * 4 + 7 * 4)


def test_a_decoding_step_by_hand() -> None:
    setting = small_setting()
    first = decode_step(setting, setting.model, setting.levers, 3, 7)
    # caches of keys and values; streams; twelve bytes a logit
    moved = 2 * 3 * 6 * 2 * 3 * 7 + 3 * 3 * 2 * (240 + 102) + 12 * 101 * 3
    expected = Work(
        matmul_flops=2 * 3 * (LAYERS + HEAD),
        attention_flops=3 * 3 * 4 * 12 * 7,
        bytes_moved=moved,
        weight_bytes=2 * (LAYERS + HEAD),
        operations=OPERATIONS,
    )
    assert first == pytest.approx(expected)


# two of four experts a token: all but (1 - 2/4)^n of them are read, of which one token's are half
@pytest.mark.parametrize(("sequences", "share"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (9, 1 - 2**-8)])
def test_more_sequences_read_more_of_the_experts(sequences: int, share: float) -> None:
    setting = small_setting(model=small_mixture(), dtype="fp32")
    used = 3 * (400 + 2 * 510) + 1010
    read = decode_step(setting, setting.model, setting.levers, sequences, 7).weight_bytes
    assert read == pytest.approx(4 * (used + share * 3 * 2 * 510))


@pytest.mark.parametrize(
    ("chosen", "moved", "sent", "messages"),
    [
        ({}, 7 * 2 * ALL, 0.0, 0),
        ({"weights_fp32": True}, 7 * 4 * ALL, 0.0, 0),
        ({"gpus": 4}, 7 * 2 * ALL, 2 * 2 * ALL * 3 / 4, 3),
        ({"gpus": 4, "parallel": "zero1"}, 7 * 2 * ALL / 4, 2 * 2 * ALL * 3 / 4, 3),
        ({"gpus": 4, "parallel": "zero2"}, 7 * 2 * ALL / 4, 0.0, 0),
        ({"gpus": 4, "parallel": "zero3"}, 7 * 2 * ALL / 4, 0.0, 0),
        ({"gpus": 2, "parallel": "fsdp"}, 7 * 2 * ALL / 2, 0.0, 0),
    ],
)
def test_an_optimizer_step_by_hand(chosen: dict[str, Any], moved: float, sent: float, messages: int) -> None:
    setting = small_setting(**chosen)
    assert optimizer_step(setting, setting.model, setting.levers) == pytest.approx(
        Work(bytes_moved=moved, communicated_bytes=sent, operations=20, messages=messages)
    )


@pytest.mark.parametrize(
    ("chosen", "paged"),
    [
        ({"offload_optimizer": True}, 2 * 2 * ALL),
        ({"offload_optimizer": True, "weights_fp32": True}, 2 * 4 * ALL),
        ({"offload_optimizer": True, "gpus": 4, "parallel": "zero1"}, 2 * 2 * ALL / 4),
        ({"optimizer": "adamw"}, 0.0),
    ],
)
def test_what_a_step_moves_to_and_from_host_memory(chosen: dict[str, Any], paged: float) -> None:
    setting = small_setting(**chosen)
    assert paged_bytes(setting, setting.model, setting.levers) == pytest.approx(paged)
    step = optimizer_step(setting, setting.model, setting.levers)
    assert step.paged_bytes == pytest.approx(paged)


@pytest.mark.parametrize(
    ("chosen", "sent"),
    [
        ({"parallel": "zero3", "gpus": 2}, 3 * 2 * ALL / 2),
        ({"parallel": "fsdp", "gpus": 4}, 3 * 2 * ALL * 3 / 4),
        ({"parallel": "fsdp", "gpus": 2, "quantisation": "int8", "software": "torchtune"}, (2 * ALL + 2 * ALL) / 2),
        ({"parallel": "zero2", "gpus": 4}, 2 * 2 * ALL * 3 / 4),
        ({"parallel": "zero2", "gpus": 4, "software": "transformers"}, 2 * ALL * 3 / 4),
        ({"parallel": "zero3"}, 0.0),
    ],
)
def test_a_micro_batch_gathers_weights_and_reduces_gradients(chosen: dict[str, Any], sent: float) -> None:
    setting = small_setting(**chosen)
    assert micro_communication(setting, setting.model, setting.levers)[0] == pytest.approx(sent)


def test_work_adds_up_field_by_field() -> None:
    first = Work(*range(1, 10))
    assert first + first.times(2) == Work(*(3 * item for item in range(1, 10)))
    assert (first.flops, first.total_bytes) == (1 + 2, 3 + 4 + 5)
    with pytest.raises(TypeError):
        _ = first + 1


def test_a_loss_that_keeps_no_logits_makes_them_again() -> None:
    setting = sft("llama-7b")
    model, levers = setting.model, setting.levers
    kept, again = (training_flops(model, levers, 1, 100, head_again=how)[0] for how in (False, True))
    assert again - kept == 2 * 32000 * 4096 * 100
    assert micro_step(setting, model, levers, 1, 100).matmul_flops == again
    whole = replace(setting, levers=replace(levers, loss="dense"))
    assert micro_step(whole, model, whole.levers, 1, 100).matmul_flops == kept


def test_a_token_meets_the_adapters_of_the_experts_it_is_routed_to() -> None:
    # Mixtral 8x7B: 32 layers, 2 of 8 experts of width 14336
    model = shape("mixtral-8x7b")
    levers = Levers(tuning="lora", lora_rank=16, lora_modules=("q", "gate", "up", "down"))
    bare = 2 * forward_matmul_flops(model, 100)
    met = 32 * 16 * ((4096 + 4096) + 2 * 3 * (4096 + 14336))
    assert training_flops(model, levers, 1, 100)[0] - bare == 6 * met * 100


def test_utilisation_of_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    model = shape("mixtral-8x7b")
    unmet = 32 * 6 * 3 * 4096 * 14336
    assert mfu(model, 1.0, 0.0, 1.0) == 6 * (model.parameters - unmet)


def test_many_tokens_of_a_small_batch_do_not_read_every_expert() -> None:
    # Mixtral routes 2 of 8: eight sequences meet 1 - (3/4)^8 of them
    model = shape("mixtral-8x7b")
    assert experts_read(model, 1) == 2 / 8
    assert experts_read(model, 8) == pytest.approx(0.8999, abs=1e-4)
    assert experts_read(shape("llama-7b"), 8) == 1
    narrow, setting = (
        replace(sft("mixtral-8x7b"), levers=Levers(tuning="frozen", quantisation=stored)) for stored in ("int8", None)
    )
    read = [decode_step(item, model, item.levers, 8, 10).weight_bytes for item in (narrow, setting)]
    assert read[1] == 2 * read[0]


def test_integers_are_unpacked_at_the_bandwidth_where_no_compiler_fuses_it() -> None:
    plain, packed = (
        small_setting(tuning="lora", quantisation=stored, software="transformers") for stored in (None, "int4")
    )
    once = LAYERS * (0.625 + 2)
    for passes, work in ((2, micro_step), (1, forward_pass)):
        moved = [work(item, item.model, item.levers, 2, 5, 4).bytes_moved for item in (plain, packed)]
        assert moved[1] - moved[0] == pytest.approx(passes * once)
    fused = small_setting(tuning="lora", quantisation="int4", software="gpt-fast")
    bare = small_setting(tuning="lora", software="gpt-fast")
    assert (
        forward_pass(fused, fused.model, fused.levers, 2, 5, 4).bytes_moved
        == forward_pass(bare, bare.model, bare.levers, 2, 5, 4).bytes_moved
    )
