"""Memory: published byte counts, printed parameter counts of adapters, and what holds for every setting."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs.formulas.activations import layer_kept
from costs.formulas.kept import (
    activation_bytes,
    kept_per_token,
    layer_inputs,
    recomputed_bytes,
    spared_tokens,
    workspace,
)
from costs.formulas.memory import (
    Moment,
    device_bytes,
    frozen_role,
    generating,
    kv_cache_bytes,
    logits_share,
    peak,
    scoring,
)
from costs.formulas.setting import Levers, Setting
from costs.formulas.states import (
    adapter_parameters,
    base_weight_bytes,
    gathered_bytes,
    gradient_bytes,
    optimizer_bytes,
    shards,
    trained_parameters,
    weights,
)
from costs.formulas.timeline import training_moments
from costs.planning.moments import moments
from costs.tables.catalogue import shape
from costs.tables.losses import loss
from costs.tables.shapes import from_config
from tests.costs.settings import ALL_LINEAR, ppo, sft, small, small_mixture, small_setting

GB = 1e9


@pytest.mark.parametrize(("parallel", "gigabytes"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6)])
def test_zero_divides_the_states_of_7_5_billion_parameters_as_printed(parallel: str, gigabytes: float) -> None:
    # arXiv 1910.02054 figure 1: 7.5B parameters, 64 devices, mixed precision with fp32 master weights and Adam
    setting = sft("llama-7b", gpus=64, dtype="fp16", master_fp32=True, parallel=parallel, software="deepspeed-chat")
    model = setting.model
    states = (
        weights(setting, model, setting.levers)
        + gradient_bytes(setting, model, setting.levers)
        + optimizer_bytes(setting, model, setting.levers)
    )
    assert states * 7.5e9 / model.parameters == pytest.approx(gigabytes * GB, rel=0.005)


def test_zero_3_divides_every_state() -> None:
    setting = sft("llama-7b", gpus=64, dtype="fp16", master_fp32=True, parallel="zero3")
    model, levers = setting.model, setting.levers
    whole = 16 * model.parameters / 64  # arXiv 1910.02054 figure 1: 1.9 GB for 7.5B
    outside = 2 * model.vocab * model.width + model.width
    gathered = 2 * (2 * model.layer_parameters + outside)
    states = (
        weights(setting, model, levers)
        + gradient_bytes(setting, model, levers)
        + optimizer_bytes(setting, model, levers)
    )
    assert states == pytest.approx(whole + gathered, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "trained"),
    [("llama-7b", 4_194_304), ("llama-13b", 6_553_600), ("stablelm-alpha-3b", 2_097_152), ("phi-1.5", 1_572_864)],
)
def test_lora_on_queries_and_values_has_the_printed_parameters(model: str, trained: int) -> None:
    # litgpt tutorials/resource-tables.md, column "trainable parameters"
    assert adapter_parameters(shape(model), Levers(tuning="lora", lora_rank=8, lora_modules=("q", "v"))) == trained


@pytest.mark.parametrize("modules", [["q", "v"], ["q", "k", "v", "o"], ["v", "o", "up", "down"]], ids="+".join)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 172}),
        ("GPT2Config", {}),
        ("GPTNeoXConfig", {"intermediate_size": 256}),
        ("Phi3Config", {"num_key_value_heads": 2, "intermediate_size": 172, "pad_token_id": 0}),
    ],
)
def test_an_adapter_has_the_parameters_that_peft_makes(name: str, fields: dict[str, int], modules: list[str]) -> None:
    import torch
    import transformers

    from config.sections.levers import Lora
    from training.modeling import adapters

    config = getattr(transformers, name)(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=500, **fields
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    adapters.add_adapter(model, Lora(rank=8, alpha=16.0, modules=modules, dropout=0.0), "sft", 1, "sft.lora")
    result = sum(parameter.numel() for parameter in adapters.adapter_parameters(model, "sft").values())
    assert (
        adapter_parameters(
            from_config(config.to_dict(), name), Levers(tuning="lora", lora_rank=8, lora_modules=tuple(modules))
        )
        == result
    )


def test_lora_of_rank_64_on_all_linear_layers_has_the_parameters_of_qlora() -> None:
    # 7B: 32 layers x 64 x (4 x 2 x 4096 + 3 x (4096 + 11008))
    assert (
        adapter_parameters(shape("llama-7b"), Levers(tuning="lora", lora_rank=64, lora_modules=ALL_LINEAR))
        == 159_907_840
    )


def test_nf4_with_double_quantisation_takes_half_a_byte_and_a_64th() -> None:
    # arXiv 2305.14314 section 3: 0.127 bits of scale a parameter instead of 0.5
    model = shape("llama-65b")
    linear = model.layers * model.layer_matrix_parameters
    single, double = (base_weight_bytes(model, Levers(tuning="lora", quantisation=kind)) for kind in ("nf4", "nf4-dq"))
    assert (single - double) * 8 / linear == pytest.approx(0.5 - 0.127, abs=0.001)


def test_the_cache_of_a_7b_model_takes_half_a_mebibyte_a_token() -> None:
    # 2 x 32 layers x 4096 x 2 bytes: arXiv 2309.06180 section 1 counts 800 KB for a 13B model's token in the same way
    assert kv_cache_bytes(shape("llama-7b"), "fp16", 1, 1) == 2**19
    assert kv_cache_bytes(shape("opt-13b"), "fp16", 1, 1) == pytest.approx(800 * 1024, rel=0.001)


def test_grouped_queries_shrink_the_cache_by_the_group() -> None:
    assert kv_cache_bytes(shape("llama-2-70b"), "bf16", 1, 1) * 8 == 2 * 80 * 8192 * 2


def test_the_whole_loss_holds_fourteen_bytes_a_logit() -> None:
    assert loss("dense").bytes_per_token(1000, 4096, 2) == 14_000
    assert loss("chunked").bytes_per_token(1000, 4096, 2) == 3_500
    assert loss("chunked").bytes_per_token(1000, 4096, 2, compiled=True) == 2_500
    assert loss("streamed").bytes_per_token(1000, 8192, 2) * 8192 == 14 * 2**22
    # an accelerator's chunk takes the same share of any memory, a small one's as many as a CPU's
    for memory, logits in ((2**36, 2**26), (2**30, 2**22)):
        item = loss("streamed").bytes_per_token(2**16, 8192, 2, accelerator_bytes=memory)
        assert item * 8192 == 14 * logits


def test_full_checkpointing_keeps_one_input_a_layer() -> None:
    plain, checkpointed = (
        sft(checkpointing=how, software="torchtune", micro_batch=4, tokens=2048) for how in ("none", "full")
    )
    kept = [
        peak(training_moments(item, item.model, item.levers)).roles["policy"]["activations"]
        for item in (plain, checkpointed)
    ]
    model = plain.model
    assert kept[1] < kept[0] / 5
    loss_moment = training_moments(checkpointed, model, checkpointed.levers)[0]
    assert loss_moment.roles["policy"]["activations"] == 4 * 2048 * (model.layers * model.width * 2 + 8 * model.width)


def test_accumulation_keeps_gradients_through_the_forward_pass() -> None:
    once, twice = sft(micro_batch=4), sft(micro_batch=4, accumulation=2)
    loss_moments = [training_moments(item, item.model, item.levers)[0].roles["policy"] for item in (once, twice)]
    new = 2 * once.model.vocab * once.model.width  # of the head, before it is added
    assert loss_moments[1]["gradients"] == 2 * once.model.parameters + new
    assert loss_moments[0].get("gradients", 0.0) < loss_moments[1]["gradients"]


def test_a_device_needs_its_context_and_the_allocators_fragments() -> None:
    setting = sft()
    assert device_bytes(setting, 10 * GB) == pytest.approx(10.4 * GB + 2**29)


def test_the_separate_layout_holds_four_models_and_the_shared_base_one() -> None:
    separate = ppo("separate", tuning="lora", lora_modules=ALL_LINEAR)
    shared = ppo("shared_base", tuning="lora", lora_modules=ALL_LINEAR)
    base = 2 * separate.model.parameters
    held = [
        sum(role["weights"] for role in moments(item)[0].roles.values() if "weights" in role)
        for item in (separate, shared)
    ]
    # with LoRA the reference is the policy with its adapter off
    assert held[0] == pytest.approx(3 * base, rel=0.06)
    assert held[1] == pytest.approx(base, rel=0.06)


def test_full_ppo_holds_policy_ref_reward_and_value() -> None:
    held = moments(ppo("separate"))[0].roles
    assert set(held) == {"policy", "ref", "reward", "value"}
    assert all(role["weights"] == 2 * ppo().model.parameters for role in held.values())


def test_a_shared_trunk_has_no_value_model() -> None:
    trunk, separate = peak(moments(ppo("shared_trunk"))).total, peak(moments(ppo("separate"))).total
    assert separate - trunk >= 2 * 3 * ppo().model.parameters  # its weights and two moments


@given(micro=st.integers(1, 32), tokens=st.integers(16, 4096), checkpointing=st.sampled_from(["none", "full"]))
def test_memory_never_shrinks_when_the_batch_grows(micro: int, tokens: int, checkpointing: str) -> None:
    small, large = (sft(micro_batch=size, tokens=tokens, checkpointing=checkpointing) for size in (micro, micro + 1))
    assert peak(moments(large)).total >= peak(moments(small)).total


@given(gpus=st.sampled_from([1, 2, 4, 8, 64]), parallel=st.sampled_from(["ddp", "zero1", "zero2"]))
def test_sharding_never_needs_more_than_data_parallel(gpus: int, parallel: str) -> None:
    sharded, plain = sft(gpus=gpus, parallel=parallel), sft(gpus=gpus)
    assert peak(moments(sharded)).total <= peak(moments(plain)).total


def test_a_fused_head_holds_a_tile_on_a_gpu_and_thirty_three_bytes_a_logit_on_a_cpu() -> None:
    fused = loss("fused")
    # the buffer is as wide for a small vocabulary
    assert fused.bytes_per_token(8192, 1024, 4) == 33 * 8192
    assert fused.bytes_per_token(8192, 1024, 2, accelerator_bytes=2**36) == 2 * 8192
    # a tile has 4,096 tokens
    assert fused.bytes_per_token(32768, 8192, 4) == 33 * 32768 / 2


def fullest(attention: str, checkpointing: bool) -> tuple[float, dict[str, object]]:
    """Bytes that torch allocated at the fullest moment of a step of a small trunk, and its configuration."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=512,
        vocab_size=64,
        max_position_embeddings=512,
    )
    trunk = transformers.LlamaModel._from_config(config, attn_implementation=attention).train()
    if checkpointing:
        trunk.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, 64, (2, 512))
    trunk(tokens).last_hidden_state.sum().backward()  # gradients are there from now on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trunk(tokens).last_hidden_state.sum().backward()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return float(most), config.to_dict()


@pytest.mark.parametrize(("attention", "checkpointing"), [("sdpa", "none"), ("eager", "none"), ("eager", "full")])
def test_the_fullest_moment_of_a_step_is_that_of_torchs_allocator(attention: str, checkpointing: str) -> None:
    measured, config = fullest(attention, checkpointing == "full")
    plain = sft(tokens=512, micro_batch=2, dtype="fp32", attention=attention, checkpointing=checkpointing)
    setting = replace(plain, model=from_config(config, "trunk"))
    kept = activation_bytes(setting, setting.model, setting.levers, 2, 512)
    assert kept + recomputed_bytes(setting, setting.model, setting.levers, 2, 512) == pytest.approx(measured, rel=0.1)


# ---------------------------------------------------------------- by hand: 4,700 parameters, three layers of 870
# weights and 890 parameters, two tables of 1,010

ALL, LAYERS, TABLE = 4700, 3 * 870, 1010
LORA: dict[str, Any] = {"tuning": "lora", "lora_rank": 2, "lora_modules": ("q", "down")}
ADAPTERS = 3 * 2 * (10 + 12 + 17 + 10)
FSDP: dict[str, Any] = {"parallel": "fsdp", "gpus": 4}


def of(bytes_of: Any, *more: Any, **chosen: Any) -> Any:
    setting = small_setting(**chosen)
    return bytes_of(setting, setting.model, setting.levers, *more)


def test_parameters_that_are_trained_by_hand() -> None:
    assert trained_parameters(small(), Levers()) == ALL
    assert trained_parameters(small(), Levers(tuning="frozen")) == 0
    assert trained_parameters(small(), Levers(**LORA)) == ADAPTERS
    every = Levers(tuning="lora", lora_rank=2, lora_modules=ALL_LINEAR)
    # each expert has its own adapters, the attention has one
    experts = 3 * (10 + 17)
    assert trained_parameters(small_mixture(), every) == 3 * 2 * (22 + 16 + 16 + 22 + 4 * experts)


@pytest.mark.parametrize(
    ("levers", "head", "size"),
    [
        (Levers(), False, 2 * ALL),
        (Levers(weights_fp32=True), False, 4 * ALL),
        (Levers(tuning="frozen", weights_fp32=True), False, 2 * ALL),
        (Levers(tuning="lora", dtype="fp32"), True, 4 * ALL),
        (Levers(tuning="lora", quantisation="nf4"), False, 0.5625 * LAYERS + 2 * (ALL - LAYERS)),
        (Levers(tuning="lora", quantisation="int8"), True, LAYERS + TABLE + 2 * (ALL - LAYERS - TABLE)),
    ],
)
def test_bytes_of_a_models_own_weights(levers: Levers, head: bool, size: float) -> None:
    assert base_weight_bytes(small(), levers, head) == pytest.approx(size)


def test_a_quantised_head_leaves_the_table_that_it_is_tied_to() -> None:
    levers, tied = Levers(tuning="lora", quantisation="int8"), small(tied=True)
    plain = tied.parameters - LAYERS
    assert base_weight_bytes(tied, levers) == LAYERS + 2 * plain
    assert base_weight_bytes(tied, levers, True) == LAYERS + TABLE + 2 * plain


@pytest.mark.parametrize(
    ("parallel", "divided"),
    [("ddp", (1, 1, 1)), ("zero1", (1, 1, 8)), ("zero2", (1, 8, 8)), ("zero3", (8, 8, 8)), ("fsdp", (8, 8, 8))],
)
def test_each_kind_of_sharding_divides_what_its_paper_says(parallel: Any, divided: tuple[int, int, int]) -> None:
    setting = small_setting(parallel=parallel, gpus=8, software="deepspeed-chat")
    assert shards(setting) == dict(zip(("weights", "gradients", "optimizer"), divided, strict=True))


UNIT = 2 * 890 + (ALL - 3 * 890)
"""Two layers, both tables and the last norm."""
COPIES = 2 * (ALL - TABLE)
"""Of autocast, which only looks the embedding up."""


@pytest.mark.parametrize(
    ("chosen", "size"),
    [
        ({}, 2 * ALL),
        (LORA, 2 * ALL + 4 * ADAPTERS),
        (LORA | {"software": "torchtune"}, 2 * ALL + 2 * ADAPTERS),
        ({"gpus": 4}, 2 * ALL),
        (FSDP, 2 * ALL / 4 + 2 * UNIT),
        ({"parallel": "zero3", "gpus": 4}, 2 * ALL / 4 + 2 * UNIT),
        ({"parallel": "zero2", "gpus": 4}, 2 * ALL / 4 + 2 * ALL + 2 * 890),
        ({"parallel": "zero2", "gpus": 4, "software": "transformers"}, 2 * ALL),
        ({"parallel": "fsdp"}, 2 * ALL),
        (FSDP | {"gpus": 2}, 2 * ALL / 2 + 2 * UNIT),
        (FSDP | LORA | {"quantisation": "int8"}, (LAYERS + 2 * (ALL - LAYERS) + 4 * ADAPTERS) / 4 + UNIT),
        ({"offload_weights": True}, 2 * 890 * 2),
        ({"offload_weights": True, "weights_fp32": True}, 2 * 890 * 2),
        (LORA | {"offload_weights": True}, 2 * 890 * 2),
        (FSDP | {"offload_weights": True}, 2 * UNIT),
        # autocast keeps 16-bit copies beside fp32 weights, where they are not gathered in 16 bit
        ({"weights_fp32": True}, 4 * ALL + COPIES),
        ({"weights_fp32": True, "dtype": "fp32"}, 4 * ALL),
        ({"weights_fp32": True, "gpus": 2, "parallel": "zero1"}, 4 * ALL + COPIES),
        ({"weights_fp32": True, "gpus": 2, "parallel": "zero2"}, 4 * ALL / 2 + 4 * ALL + 4 * 890 + COPIES),
        (FSDP | {"weights_fp32": True}, 4 * ALL / 4 + 4 * UNIT + COPIES),
        (FSDP | {"weights_fp32": True, "software": "llm-foundry"}, 4 * ALL / 4 + 2 * UNIT),
        ({"parallel": "zero3", "gpus": 4, "weights_fp32": True}, 4 * ALL / 4 + 4 * UNIT + COPIES),
        # a base that is frozen in fp32
        (LORA | {"weights_fp32": True}, 4 * ALL + 4 * ADAPTERS),
    ],
)
def test_bytes_of_weights_on_a_device(chosen: dict[str, Any], size: float) -> None:
    assert of(weights, **chosen) == pytest.approx(size)


def test_software_that_quantises_its_head_holds_less() -> None:
    plain, head = (
        of(weights, tuning="frozen", quantisation="nf4", software=software) for software in ("ours", "litgpt")
    )
    assert plain - head == pytest.approx((2 - 0.5625) * TABLE)


@pytest.mark.parametrize(
    ("chosen", "size"),
    [
        (FSDP, 2 * ALL),
        ({"parallel": "zero3", "gpus": 4}, 2 * ALL),
        (FSDP | LORA, 2 * ALL + 4 * ADAPTERS),
        (FSDP | {"offload_weights": True}, 2 * ALL),
        (FSDP | {"weights_fp32": True}, 4 * ALL + COPIES),
        ({"weights_fp32": True}, COPIES),
        ({"parallel": "fsdp"}, 0.0),
        ({"parallel": "zero2", "gpus": 4}, 2 * ALL),
        (FSDP | {"software": "transformers"}, 0.0),
    ],
)
def test_a_divided_role_grows_to_its_whole_size_while_it_is_gathered(chosen: dict[str, Any], size: float) -> None:
    assert of(gathered_bytes, **chosen) == pytest.approx(size)


@pytest.mark.parametrize(
    ("chosen", "size"),
    [
        ({}, 2 * ALL),
        ({"weights_fp32": True}, 4 * ALL),
        (LORA, 4 * ADAPTERS),
        (LORA | {"software": "torchtune", "weights_fp32": True}, 2 * ADAPTERS),
        ({"parallel": "zero2", "gpus": 4}, 2 * ALL / 4),
        ({"parallel": "zero1", "gpus": 4}, 2 * ALL),
        ({"tuning": "frozen"}, 0.0),
    ],
)
def test_bytes_of_gradients_on_a_device(chosen: dict[str, Any], size: float) -> None:
    assert of(gradient_bytes, **chosen) == pytest.approx(size)


@pytest.mark.parametrize(
    ("chosen", "size"),
    [
        ({}, 2 * 2 * ALL),
        ({"weights_fp32": True}, 2 * 4 * ALL),
        ({"master_fp32": True}, 3 * 4 * ALL),
        ({"optimizer": "adamw8bit"}, 2 * (1 + 1 / 64) * (ALL - TABLE) + 8 * TABLE),
        ({"optimizer": "adamw8bit", "software": "torchtune"}, 2 * (1 + 1 / 64) * ALL),
        (LORA, 2 * 4 * ADAPTERS),
        (LORA | {"software": "torchtune", "weights_fp32": True}, 2 * 2 * ADAPTERS),
        ({"parallel": "zero1", "gpus": 4}, 2 * 2 * ALL / 4),
    ],
)
def test_bytes_of_the_optimizers_state(chosen: dict[str, Any], size: float) -> None:
    assert of(optimizer_bytes, **chosen) == pytest.approx(size)
    assert of(optimizer_bytes, **chosen, offload_optimizer=True) == 0


def kept(setting: Setting, mask: bool = False, **otherwise: Any) -> dict[str, float]:
    """Bytes per token that a layer keeps, which test_activations.py holds against autograd."""
    levers = replace(setting.levers, **otherwise)
    return layer_kept(setting.model, levers, setting.engine, 8, mask)


ENDS = 2 * 10 * 2 + 4 * 10


def held_for(setting: Setting, sequences: float = 3) -> float:
    return activation_bytes(setting, setting.model, setting.levers, sequences, 8)


def test_activations_are_those_of_every_layer_and_of_the_ends() -> None:
    plain = small_setting()
    layer = sum(kept(plain).values())
    assert of(kept_per_token, 8) == pytest.approx(layer)
    assert held_for(plain) == pytest.approx(3 * 8 * (3 * layer + ENDS))


def test_tokens_that_nobody_reads_keep_neither_feed_forward_part_nor_its_norm() -> None:
    for work, levers, narrowed in (
        ({"read_tokens": 0.25}, {}, True),
        ({"read_tokens": 0.25}, {"attention": "eager"}, False),
        ({"read_tokens": 0.25}, {"software": "transformers"}, False),
    ):
        setting = small_setting(work, **levers)
        whole = replace(setting, workload=replace(setting.workload, read_tokens=1.0))
        assert spared_tokens(setting, setting.model, setting.levers, 100.0) == 75.0 * narrowed
        assert spared_tokens(whole, setting.model, setting.levers, 100.0) == 0
        layer = kept(setting)
        item = layer["feed_forward"] + layer["norms"] / 2
        assert held_for(whole) - held_for(setting) == pytest.approx(narrowed * 18 * item)


@pytest.mark.parametrize(
    ("family", "narrowed"), [("llama", 1), ("mistral", 1), ("qwen2", 1), ("qwen3", 1), ("gemma", 0), ("gpt2", 0)]
)
def test_only_families_whose_layers_our_stages_narrow_spare_tokens(family: str, narrowed: int) -> None:
    setting = small_setting({"read_tokens": 0.25}, model=small(family=family))
    assert spared_tokens(setting, setting.model, setting.levers, 100.0) == 75 * narrowed


def test_a_recomputed_layer_keeps_its_input_whole() -> None:
    inputs = 3 * 10 * 2
    plain = small_setting({"read_tokens": 0.25}, checkpointing="full")
    assert held_for(plain) == 3 * 8 * (inputs + ENDS)
    assert layer_inputs(Levers(), small()) == 20
    assert layer_inputs(Levers(weights_fp32=True), small()) == 40  # the residual stream is fp32
    assert layer_inputs(Levers(weights_fp32=True, dtype="fp32"), small()) == 40


def test_each_layer_keeps_the_mask_of_a_batch_with_padding() -> None:
    setting = small_setting({"masked": True, "mean_tokens": 7.0}, micro_batch=2)
    plain = small_setting(micro_batch=2)
    assert kept(setting, mask=True)["mask"] == 2 * 8
    assert held_for(setting) - held_for(plain) == 3 * 8 * 3 * (
        sum(kept(setting, mask=True).values()) - sum(kept(plain).values())
    )
    again = replace(setting, levers=replace(setting.levers, checkpointing="full"))
    once = recomputed_bytes(again, again.model, again.levers, 3, 8)
    unmasked = replace(plain, levers=again.levers)
    assert once - recomputed_bytes(unmasked, again.model, again.levers, 3, 8) == 3 * 8 * (
        sum(kept(setting, mask=True).values()) - sum(kept(plain).values())
    )


def test_the_backward_pass_works_on_one_layer_by_hand() -> None:
    active = 2 * (17 + 10) * 2
    assert of(recomputed_bytes, 3, 8) == 3 * 8 * active
    layer = sum(kept(small_setting(checkpointing="full")).values())
    again = of(recomputed_bytes, 3, 8, checkpointing="full")
    assert again == pytest.approx(3 * 8 * (layer + active))
    used = of(recomputed_bytes, 3, 8, model=small_mixture())
    assert used == 3 * 8 * 2 * (2 * 17 + 10) * 2


def test_the_softmax_of_a_long_sequence_outweighs_the_feed_forward_part() -> None:
    setting = small_setting(attention="eager")
    feed_forward = layer_kept(setting.model, setting.levers, setting.engine, 200)["feed_forward"]
    assert of(recomputed_bytes, 3, 200, attention="eager") == pytest.approx(3 * 200 * (2 * 4 * 200 * 2 - feed_forward))
    assert of(recomputed_bytes, 3, 2, attention="eager") == 3 * 2 * 2 * (17 + 10) * 2


def test_the_largest_quantised_matrix_is_unpacked_twice() -> None:
    assert of(workspace) == 0
    for storage in ("nf4", "nf4-dq", "int8"):
        assert of(workspace, tuning="lora", quantisation=storage) == 2 * 2 * 10 * 17
    wide = small(mlp_width=5)
    assert of(workspace, tuning="lora", quantisation="nf4", model=wide) == 2 * 2 * 10 * 12
    assert of(workspace, tuning="lora", quantisation="nf4", software="litgpt") == 2 * 2 * TABLE


def test_a_frozen_role_holds_weights_of_the_compute_type_alone() -> None:
    assert of(frozen_role, weights_fp32=True) == {"weights": 2 * ALL}
    assert of(frozen_role, **LORA) == {"weights": 2 * ALL}
    divided = of(frozen_role, **FSDP, weights_fp32=True)
    assert divided == {"weights": 2 * ALL / 4}
    others = of(frozen_role, **FSDP, software="torchtune")
    assert others == {"weights": 2 * ALL / 4 + 2 * UNIT}


def test_the_cache_by_hand() -> None:
    assert kv_cache_bytes(small(), "fp32", 5, 7) == 2 * 3 * 6 * 4 * 5 * 7


ATTENDING = 4 * 10 + 3 * (12 + 6)
"""Of the small shape: wider than its feed-forward part, which is unusually narrow."""


def test_what_a_generating_role_holds_by_hand() -> None:
    # prompts of like length go together, with the keys and values of all three layers
    prefill = 0.55 * 5 * 4 * (ATTENDING + 3 * 2 * 6) * 2
    assert of(generating, 5, 7, 4) == {
        "kv_cache": 2 * 3 * 6 * 2 * 5 * (4 + 32),  # with the columns that are spare
        "activations": pytest.approx(prefill),
        "logits": 5 * 101 * 10,
        "workspace": 0.0,
    }
    mixture = of(generating, 5, 7, 4, model=small_mixture(), dtype="fp32")
    together = 0.55 * 5 * 4 * (2 * (3 * 17 + 20) + 3 * 2 * 6) * 4
    assert mixture["activations"] == pytest.approx(together)
    assert mixture["logits"] == 5 * 101 * 12
    assert of(generating, 5, 7, 4, tuning="lora", quantisation="nf4")["workspace"] == 680


def test_what_a_pass_without_gradient_holds_by_hand() -> None:
    assert of(scoring, 5, 8, False) == {"activations": 40 * ATTENDING * 2, "logits": 0.0, "workspace": 0.0}
    short = small_setting({"response_tokens": 2})
    result = scoring(short, short.model, short.levers, 5, 8, True)
    # a quarter of the tokens is of responses, all of whose logits fit in one chunk; they are made when of the trunk
    # only these tokens' hidden states are left
    assert result["activations"] == 2 * 10 * 10 * 2
    assert result["logits"] == 10 * 14 * 101
    mixture = of(scoring, 5, 8, False, model=small_mixture())
    assert mixture["activations"] == 40 * (3 * 2 * 17 + 40) * 2
    eager = of(scoring, 5, 8, False, attention="eager")
    assert eager["activations"] == 40 * (2 * 4 * 8 + 40) * 2
    assert of(scoring, 5, 2, False, attention="eager")["activations"] == 10 * ATTENDING * 2
    assert of(scoring, 5, 8, False, tuning="lora", quantisation="nf4")["workspace"] == 680


def test_a_compiled_pass_never_upcasts_a_chunk() -> None:
    setting = small_setting(software="unsloth")
    assert scoring(setting, setting.model, setting.levers, 5, 8, True)["logits"] == 40 * 4 * 101
    fp32 = small_setting(dtype="fp32")
    result = scoring(fp32, fp32.model, fp32.levers, 5, 8, True)["logits"]
    assert result == pytest.approx(40 * 12 * 101)


def test_the_response_is_the_share_of_the_longest_sequence_that_it_takes() -> None:
    assert logits_share(small_setting({"response_tokens": 2})) == 2 / 8
    assert logits_share(small_setting()) == 1


def test_the_peak_is_the_moment_whose_roles_hold_most_together() -> None:
    first = Moment("one", {"policy": {"weights": 3.0, "logits": 2.0}})
    two = Moment("two", {"policy": {"weights": 3.0}, "value": {"weights": 1.0, "logits": 2.0}})
    assert (first.total, two.total) == (5.0, 6.0)
    assert peak([first, two, first]) is two


def test_a_host_needs_what_is_allocated() -> None:
    assert device_bytes(sft(device="cpu"), 10.0) == 10.0


def test_under_fsdps_mixed_precision_the_residual_stream_is_narrow() -> None:
    def inputs(parallel: str, software: str, gpus: int = 2) -> float:
        setting = small_setting(
            weights_fp32=True, parallel=parallel, gpus=gpus, software=software, checkpointing="full"
        )
        held = activation_bytes(setting, setting.model, setting.levers, 1, 8)
        return held - 8 * (2 * 10 * 2 + 4 * 10)

    # three layers' inputs of width 10
    assert inputs("fsdp", "llm-foundry") == 8 * 3 * 10 * 2
    assert inputs("ddp", "transformers") == 8 * 3 * 10 * 4
    assert inputs("fsdp", "transformers", gpus=1) == 8 * 3 * 10 * 4
    # FSDP2 as our stages use it has no type of its own, and autocast keeps the stream wide
    assert inputs("fsdp", "ours") == 8 * 3 * 10 * 4


def test_a_kernel_that_unpacks_integers_has_copies_and_a_compiler_has_none() -> None:
    packed = {"tuning": "lora", "quantisation": "int4"}
    assert of(workspace, **packed, software="transformers") == 2 * 2 * 10 * 17
    assert of(workspace, **packed, software="gpt-fast") == 0
    assert of(workspace, tuning="lora", quantisation="nf4", software="torchtune") == 680


def test_old_transformers_make_the_logits_of_the_whole_prompt() -> None:
    assert of(generating, 5, 7, 4, software="deepspeed-chat")["logits"] == 5 * 4 * 101 * (2 + 4)
    assert of(generating, 5, 7, 1, software="deepspeed-chat")["logits"] == 5 * 101 * 10
    assert of(generating, 5, 7, 4, software="transformers")["logits"] == 5 * 101 * 10
