"""Memory: published byte counts, printed parameter counts of adapters, and what holds for every
setting.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs.formulas.memory import (
    activation_bytes,
    adapter_parameters,
    base_weight_bytes,
    device_bytes,
    gradient_bytes,
    kv_cache_bytes,
    optimizer_bytes,
    peak,
    recomputed_bytes,
    weights,
)
from costs.formulas.setting import Levers
from costs.formulas.timeline import training_moments
from costs.planning.stages import moments
from costs.tables.catalogue import shape
from costs.tables.engines import engine, loss
from costs.tables.shapes import from_config
from tests.costs.settings import ALL_LINEAR, ppo, sft

GB = 1e9


@pytest.mark.parametrize(
    ("parallel", "gigabytes"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6)]
)
def test_zero_divides_the_states_of_7_5_billion_parameters_as_printed(
    parallel: str, gigabytes: float
) -> None:
    # arXiv 1910.02054 figure 1: 7.5B parameters, 64 devices, mixed precision with fp32 master
    # weights and Adam
    setting = sft("llama-7b", gpus=64, dtype="fp16", master_fp32=True, parallel=parallel)
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
    gathered = 2 * (2 * model.layer_parameters + model.vocab * model.width)
    states = (
        weights(setting, model, levers)
        + gradient_bytes(setting, model, levers)
        + optimizer_bytes(setting, model, levers)
    )
    assert states == pytest.approx(whole + gathered, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "trained"),
    [
        ("llama-7b", 4_194_304),
        ("llama-13b", 6_553_600),
        ("stablelm-alpha-3b", 2_097_152),
        ("phi-1.5", 1_572_864),
    ],
)
def test_lora_on_queries_and_values_has_the_printed_parameters(model: str, trained: int) -> None:
    # litgpt tutorials/resource-tables.md, column "trainable parameters"
    assert (
        adapter_parameters(
            shape(model), Levers(tuning="lora", lora_rank=8, lora_modules=("q", "v"))
        )
        == trained
    )


@pytest.mark.parametrize(
    "modules", [["q", "v"], ["q", "k", "v", "o"], ["v", "o", "up", "down"]], ids="+".join
)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaConfig", {"num_key_value_heads": 2, "intermediate_size": 172}),
        ("GPT2Config", {}),
        ("GPTNeoXConfig", {"intermediate_size": 256}),
        ("Phi3Config", {"num_key_value_heads": 2, "intermediate_size": 172, "pad_token_id": 0}),
    ],
)
def test_an_adapter_has_the_parameters_that_peft_makes(
    name: str, fields: dict[str, int], modules: list[str]
) -> None:
    import torch
    import transformers

    from config.sections.levers import Lora
    from training.modeling import adapters

    config = getattr(transformers, name)(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=500, **fields
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    adapters.add_adapter(
        model, Lora(rank=8, alpha=16.0, modules=modules, dropout=0.0), "sft", 1, "sft.lora"
    )
    made = sum(
        parameter.numel() for parameter in adapters.adapter_parameters(model, "sft").values()
    )
    assert (
        adapter_parameters(
            from_config(config.to_dict(), name),
            Levers(tuning="lora", lora_rank=8, lora_modules=tuple(modules)),
        )
        == made
    )


def test_lora_of_rank_64_on_all_linear_layers_has_the_parameters_of_qlora() -> None:
    # 7B: 32 layers x 64 x (4 x 2 x 4096 + 3 x (4096 + 11008))
    assert (
        adapter_parameters(
            shape("llama-7b"), Levers(tuning="lora", lora_rank=64, lora_modules=ALL_LINEAR)
        )
        == 159_907_840
    )


def test_nf4_with_double_quantisation_takes_half_a_byte_and_a_64th() -> None:
    # arXiv 2305.14314 section 3: 0.127 bits of scale a parameter instead of 0.5
    model = shape("llama-65b")
    linear = model.layers * model.layer_matrix_parameters
    single, double = (
        base_weight_bytes(model, Levers(tuning="lora", quantisation=kind))
        for kind in ("nf4", "nf4-dq")
    )
    assert (single - double) * 8 / linear == pytest.approx(0.5 - 0.127, abs=0.001)


def test_the_cache_of_a_7b_model_takes_half_a_mebibyte_a_token() -> None:
    # 2 x 32 layers x 4096 x 2 bytes: arXiv 2309.06180 section 1 counts 800 KB for a 13B model's
    # token in the same way
    assert kv_cache_bytes(shape("llama-7b"), "fp16", 1, 1) == 2**19
    assert kv_cache_bytes(shape("opt-13b"), "fp16", 1, 1) == pytest.approx(800 * 1024, rel=0.001)


def test_grouped_queries_shrink_the_cache_by_the_group() -> None:
    assert kv_cache_bytes(shape("llama-2-70b"), "bf16", 1, 1) * 8 == 2 * 80 * 8192 * 2


def test_the_whole_loss_holds_fourteen_bytes_a_logit() -> None:
    assert loss("whole").bytes_per_token(1000, 4096, 2) == 14_000
    assert loss("chunked").bytes_per_token(1000, 4096, 2) == 3_500
    assert loss("chunked").bytes_per_token(1000, 4096, 2, compiled=True) == 2_500
    assert loss("streamed").bytes_per_token(1000, 8192, 2) * 8192 == 14 * 2**22


def test_full_checkpointing_keeps_one_input_a_layer() -> None:
    plain, checkpointed = (
        sft(checkpointing=how, software="torchtune", micro_batch=4, tokens=2048)
        for how in ("none", "full")
    )
    kept = [
        peak(training_moments(each, each.model, each.levers)).roles["policy"]["activations"]
        for each in (plain, checkpointed)
    ]
    model = plain.model
    assert kept[1] < kept[0] / 5
    loss_moment = training_moments(checkpointed, model, checkpointed.levers)[0]
    assert loss_moment.roles["policy"]["activations"] == 4 * 2048 * (
        model.layers * model.width * 2 + 8 * model.width
    )


def test_the_optimizer_in_the_backward_pass_saves_the_gradients() -> None:
    usual, fused = (
        sft(software="torchtune", tokens=128, checkpointing="full", optimizer_in_backward=how)
        for how in (False, True)
    )
    difference = peak(moments(usual)).total - peak(moments(fused)).total
    assert difference > 0.3 * 2 * usual.model.parameters


def test_accumulation_keeps_gradients_through_the_forward_pass() -> None:
    once, twice = sft(micro_batch=4), sft(micro_batch=4, accumulation=2)
    loss_moments = [
        training_moments(each, each.model, each.levers)[0].roles["policy"] for each in (once, twice)
    ]
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
        sum(role["weights"] for role in moments(each)[0].roles.values() if "weights" in role)
        for each in (separate, shared)
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


@given(
    micro=st.integers(1, 32),
    tokens=st.integers(16, 4096),
    checkpointing=st.sampled_from(["none", "full"]),
)
def test_memory_never_shrinks_when_the_batch_grows(
    micro: int, tokens: int, checkpointing: str
) -> None:
    small, large = (
        sft(micro_batch=size, tokens=tokens, checkpointing=checkpointing)
        for size in (micro, micro + 1)
    )
    assert peak(moments(large)).total >= peak(moments(small)).total


@given(gpus=st.sampled_from([1, 2, 4, 8, 64]), parallel=st.sampled_from(["ddp", "zero1", "zero2"]))
def test_sharding_never_needs_more_than_data_parallel(gpus: int, parallel: str) -> None:
    sharded, plain = sft(gpus=gpus, parallel=parallel), sft(gpus=gpus)
    assert peak(moments(sharded)).total <= peak(moments(plain)).total


def test_tensor_parallel_divides_weights() -> None:
    setting = replace(
        sft("llama-7b", gpus=4, tensor_parallel=4, tuning="frozen"), engine=engine("gpt-fast")
    )
    assert weights(setting, setting.model, setting.levers) == setting.model.parameters * 2 / 4


def test_a_fused_head_holds_a_tile_on_a_gpu_and_thirty_three_bytes_a_logit_on_a_cpu() -> None:
    fused = loss("fused")
    # the buffer is as wide for a small vocabulary
    assert fused.bytes_per_token(8192, 1024, 4, host=True) == 33 * 8192 + 4 * (32768 - 8192)
    assert fused.bytes_per_token(8192, 1024, 2) == 2 * 32768
    # a tile has 4,096 tokens
    assert fused.bytes_per_token(32768, 8192, 4, host=True) == 33 * 32768 / 2


def fullest(attention: str, checkpointing: bool) -> tuple[float, dict[str, object]]:
    """Bytes that torch allocated at the fullest moment of a step of a small trunk, and its
    configuration.
    """
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
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        trunk(tokens).last_hidden_state.sum().backward()
    held = most = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return float(most), config.to_dict()


@pytest.mark.parametrize(
    ("attention", "checkpointing"), [("sdpa", "none"), ("eager", "none"), ("eager", "full")]
)
def test_the_fullest_moment_of_a_step_is_that_of_torchs_allocator(
    attention: str, checkpointing: str
) -> None:
    measured, config = fullest(attention, checkpointing == "full")
    plain = sft(
        tokens=512, micro_batch=2, dtype="fp32", attention=attention, checkpointing=checkpointing
    )
    setting = replace(plain, model=from_config(config, "trunk"))
    kept = activation_bytes(setting, setting.model, setting.levers, 2, 512)
    assert kept + recomputed_bytes(setting, setting.model, setting.levers, 2, 512) == pytest.approx(
        measured, rel=0.1
    )
