"""What one layer keeps for the backward pass, against the tensors that autograd really saves for Transformers'
modules.
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.engines import ENGINES, engine
from costs.formulas.activations import layer_kept
from costs.formulas.setting import Levers
from costs.tables.engines import Engine
from costs.tables.shapes import ModelShape, from_config
from tests.costs.settings import ALL_LINEAR, small, small_mixture

BATCH, TOKENS = 2, 64
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500}
GATED = SIZES | {"intermediate_size": 160}

MODULES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", GATED),
    ("LlamaConfig", GATED | {"num_key_value_heads": 2}),
    ("MistralConfig", GATED | {"num_key_value_heads": 2}),
    ("Qwen2Config", GATED | {"num_key_value_heads": 2}),
    ("Qwen3Config", GATED | {"num_key_value_heads": 2, "head_dim": 16}),
    ("GemmaConfig", GATED | {"num_key_value_heads": 2, "head_dim": 16}),
    ("GPT2Config", {"n_embd": 64, "n_head": 4, "vocab_size": 500, "bos_token_id": 1, "eos_token_id": 2}),
    ("GPTNeoXConfig", GATED),
    ("OPTConfig", SIZES | {"ffn_dim": 160, "word_embed_proj_dim": 64}),
    ("PhiConfig", GATED),
    ("StableLmConfig", GATED | {"num_key_value_heads": 4}),
]


def saved_bytes(
    name: str, fields: dict[str, Any], dtype: str, attention: str, adapted: list[str] | None, padding: int = 0
) -> tuple[float, ModelShape]:
    """Bytes per token that a third layer adds to what autograd saves, and the shape. Storages that several tensors
    share count once.
    """
    import torch
    import transformers

    totals, config = [], None
    for layers in (2, 3):
        key = "n_layer" if name == "GPT2Config" else "num_hidden_layers"
        config = getattr(transformers, name)(**fields, **{key: layers})
        for dropout in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout", "dropout"):
            if hasattr(config, dropout):
                setattr(config, dropout, 0.0)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention)
        model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).train()
        if adapted:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=adapted, lora_dropout=0.0))
        totals.append(_saved(model, torch.randint(0, 500, (BATCH, TOKENS)), padding))
    assert config is not None
    return (totals[1] - totals[0]) / (BATCH * TOKENS), from_config(config.to_dict(), name)


def _saved(model: Any, ids: Any, padding: int) -> float:
    import torch

    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # a freed address would be counted for another tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mask = torch.ones_like(ids)
        mask[0, TOKENS - padding :] = 0
        output = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert output.requires_grad
    return float(sum(kept.values()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "fields"), MODULES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(MODULES)]
)
def test_a_layer_keeps_what_autograd_saves(name: str, fields: dict[str, Any], dtype: str, attention: str) -> None:
    measured, shape = saved_bytes(name, fields, dtype, attention, None)
    levers = Levers(dtype=dtype, attention="eager" if attention == "eager" else "sdpa")
    assert sum(layer_kept(shape, levers, engine("ours"), TOKENS).values()) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "fields"), MODULES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(MODULES)]
)
def test_a_layer_keeps_a_mask_of_its_own_where_one_token_is_padding(
    name: str, fields: dict[str, Any], dtype: str
) -> None:
    measured, shape = saved_bytes(name, fields, dtype, "sdpa", None, padding=1)
    kept = layer_kept(shape, Levers(dtype=dtype), engine("ours"), TOKENS, mask_tensor=True)
    assert kept["mask"] == TOKENS * (4 if dtype == "fp32" else 2)
    assert sum(kept.values()) == pytest.approx(measured, rel=0.01)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("adapted", "modules"), [(["q_proj", "v_proj"], ("q", "v")), (ALL, ("q", "k", "v", "o", "gate", "up", "down"))]
)
def test_a_layer_with_lora_keeps_what_autograd_saves(adapted: list[str], modules: tuple[str, ...], dtype: str) -> None:
    measured, shape = saved_bytes("LlamaConfig", GATED, dtype, "sdpa", adapted)
    levers = Levers(dtype=dtype, tuning="lora", lora_rank=4, lora_modules=modules)
    assert sum(layer_kept(shape, levers, engine("ours"), TOKENS).values()) == pytest.approx(measured, rel=0.01)


def test_a_gpt_layer_in_16_bit_with_dropout_keeps_34_d_and_5_heads_s() -> None:
    # arXiv 2205.05198 equation 1, of fused kernels: GELU in one piece, softmax in 16 bit as GPT-2 has it
    shape = from_config(
        {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 16, "vocab_size": 100, "n_positions": 64}, "gpt"
    )
    fused = Engine("fused", fused_activation=True, fused_norm=True)
    kept = layer_kept(shape, Levers(dtype="fp16", attention="eager"), fused, 512)
    # of the paper's 34 and 5, two and three are dropout's masks and its copy of the probabilities
    assert sum(kept.values()) == pytest.approx(32 * 1024 + 2 * 16 * 512, rel=0.01)


def test_frozen_linear_layers_keep_no_input() -> None:
    shape = from_config({"model_type": "llama", **GATED, "num_hidden_layers": 1}, "llama")
    frozen = layer_kept(shape, Levers(tuning="lora", lora_modules=("q",)), ENGINES["ours"], TOKENS)
    assert "projections" not in frozen
    assert layer_kept(shape, Levers(), ENGINES["ours"], TOKENS)["projections"] == 2 * 64 * 2


# ---------------------------------------------------------------- by hand: width 10, queries 12, keys and values 6,
# four heads, feed-forward 17, eight tokens

PLAIN = Engine("plain", repeats_kv=False, fused_activation=False)
PEFT = replace(PLAIN, lora_input_bytes=4.0)
MIXED = Levers(weights_fp32=True)
FP32 = Levers(dtype="fp32")
FROZEN = Levers(tuning="frozen")
EAGER = Levers(attention="eager")


def part(
    name: str,
    levers: Levers,
    family: str = "llama",
    software: Engine = PLAIN,
    mask: bool = False,
    shape: ModelShape | None = None,
    **facts: Any,
) -> float:
    """Bytes per token of one part of a layer; `facts` of the engine."""
    kept = layer_kept(shape or small(family=family), levers, replace(software, **facts), 8, mask)
    return kept.get(name, 0.0)


@pytest.mark.parametrize(
    ("levers", "family", "facts", "size"),
    [
        # an RMS norm keeps a fp32 copy, its scale, and what its weight multiplies
        (Levers(), "llama", {}, 2 * (40 + 20 + 4)),
        (FP32, "llama", {}, 2 * (40 + 40 + 4)),
        (MIXED, "llama", {}, 2 * (40 + 40 + 4)),
        (FROZEN, "llama", {}, 2 * (40 + 4)),
        (Levers(tuning="lora"), "llama", {}, 2 * (40 + 4)),
        (Levers(), "gemma", {}, 2 * (40 + 40 + 4)),
        (Levers(), "llama", {"wide_norm": True}, 2 * (40 + 40 + 4)),
        # a norm in one kernel keeps its input and two numbers
        (Levers(), "llama", {"fused_norm": True}, 2 * 20 + 16),
        (Levers(), "llama", {"compiled": True}, 2 * 20 + 16),
        (FROZEN, "llama", {"compiled": True}, 2 * 20 + 16),
        (Levers(), "gpt2", {}, 2 * 20 + 16),
        (MIXED, "gpt2", {}, 2 * 40 + 16),
        (replace(MIXED, dtype="fp32"), "gpt2", {}, 2 * 40 + 16),
        (Levers(), "gpt_neox", {}, 20 + 16),
        (Levers(), "falcon", {}, 20 + 16),
    ],
)
def test_norms_by_hand(levers: Levers, family: str, facts: dict[str, Any], size: float) -> None:
    assert part("norms", levers, family, **facts) == size


def lora(*modules: str, **more: Any) -> Levers:
    return Levers(tuning="lora", lora_rank=2, lora_modules=modules, **more)


@pytest.mark.parametrize(
    ("levers", "family", "software", "size"),
    [
        (Levers(), "llama", PLAIN, 2 * 20),
        (FP32, "llama", PLAIN, 2 * 40),
        # autocast casts an input for each of q, k, v, gate and up
        (MIXED, "llama", PLAIN, 5 * 20),
        (MIXED, "opt", PLAIN, 4 * 20),
        (MIXED, "gpt2", PLAIN, 2 * 20),
        (MIXED, "phi3", PLAIN, 3 * 20),
        (FROZEN, "llama", PLAIN, 0),
        (lora("q"), "llama", PLAIN, 20),
        (lora("k"), "llama", PLAIN, 20),
        (lora("v"), "llama", PLAIN, 20),
        (lora("gate"), "llama", PLAIN, 20),
        (lora("up"), "llama", PLAIN, 20),
        (lora("gate"), "opt", PLAIN, 0),
        (lora("up"), "opt", PLAIN, 20),
        (lora("o", "down"), "llama", PLAIN, 0),
        (lora("q", "up"), "llama", PLAIN, 40),
        # PEFT takes a copy in fp32 instead, and dropout one of its own
        (lora("q", "up"), "llama", PEFT, 0),
        (lora("q", "up", dtype="fp32"), "llama", PEFT, 80),
        (lora("q", "up", lora_dropout=True), "llama", PLAIN, 0),
        (lora("o", quantisation="nf4"), "llama", PLAIN, 0),
        (lora("o", quantisation="nf4"), "llama", replace(PLAIN, quantised_keeps_input=True), 40),
        (lora("o"), "llama", replace(PLAIN, quantised_keeps_input=True), 0),
    ],
)
def test_inputs_of_projections_by_hand(levers: Levers, family: str, software: Engine, size: float) -> None:
    assert part("projections", levers, family, software) == size


@pytest.mark.parametrize(
    ("levers", "size"), [(Levers(), 20), (MIXED, 20), (lora("q"), 20), (lora("up"), 20), (lora("o"), 0)]
)
def test_parallel_branches_with_one_norm_share_their_input(levers: Levers, size: float) -> None:
    phi = small(family="phi", norms=1)
    assert part("projections", levers, shape=phi) == size
    both = small(family="gpt_neox")  # parallel, with a norm for each
    assert part("projections", Levers(), shape=both) == 40


@pytest.mark.parametrize(
    ("levers", "family", "facts", "size"),
    [
        # queries, keys and values; four bytes a head; the output
        (Levers(), "llama", {}, 2 * (12 + 6 + 6) + 16 + 24),
        (FP32, "llama", {}, 4 * (12 + 6 + 6) + 16 + 48),
        (FROZEN, "llama", {}, 2 * (12 + 6 + 6) + 16 + 24),
        (Levers(), "llama", {"repeats_kv": True}, 2 * (12 + 12 + 12) + 16 + 24),
        (Levers(), "falcon", {}, 2 * (12 + 12 + 12) + 16 + 24),
        # values that stay a view keep the packed projection
        (Levers(), "llama", {"packed_view": True}, 2 * (12 + 6 + 24) + 16 + 24),
        (Levers(), "llama", {"packed_view": True, "compiled": True}, 2 * 24 + 16 + 24),
        (Levers(), "llama", {"packed_view": True, "repeats_kv": True}, 2 * 36 + 16 + 24),
        # a copy for the output projection, where that keeps its input
        (Levers(), "llama", {"attention_copy": True}, 2 * 24 + 16 + 2 * 24),
        (Levers(), "llama", {"attention_copy": True, "compiled": True}, 2 * 24 + 16 + 24),
        (FROZEN, "llama", {"attention_copy": True}, 2 * 24 + 16 + 24),
        (lora("o"), "llama", {"attention_copy": True}, 2 * 24 + 16 + 2 * 24),
        (Levers(), "phi", {}, 2 * 24 + 16 + 2 * 24),
        (Levers(), "stablelm", {}, 2 * 24 + 16 + 2 * 24),
        (Levers(), "gpt_neox", {}, 2 * (12 + 6 + 24) + 16 + 2 * 24),
        # norms of queries and keys
        (Levers(), "qwen3", {}, 2 * 24 + 16 + 24 + 18 * (4 + 2)),
        (FROZEN, "qwen3", {}, 2 * 24 + 16 + 24 + 18 * 4),
        # eager: scores, which the softmax casts to fp32, and the output
        (EAGER, "llama", {}, 3 * 24 + 4 * 8 * (2 + 4) + 24),
        (replace(EAGER, tuning="frozen"), "llama", {}, 3 * 24 + 4 * 8 * (2 + 4)),
        (lora("o", attention="eager"), "llama", {}, 3 * 24 + 4 * 8 * (2 + 4) + 24),
        (replace(EAGER, dtype="fp32"), "llama", {}, 3 * 48 + 4 * 8 * 4 + 48),
        (EAGER, "gpt2", {}, 3 * 24 + 4 * 8 * 2 + 24),
        (EAGER, "falcon", {}, 3 * 24 + 4 * 8 * 2 + 24),
        (EAGER, "gemma2", {}, 3 * 24 + 4 * 8 * (2 + 4 + 2) + 24),
        (EAGER, "qwen3", {}, 3 * 24 + 4 * 8 * (2 + 4) + 24 + 18 * (4 + 2)),
    ],
)
def test_attention_by_hand(levers: Levers, family: str, facts: dict[str, Any], size: float) -> None:
    assert part("attention", levers, family, **facts) == size


def test_a_mask_has_grouped_keys_repeated_and_is_kept_itself() -> None:
    assert part("attention", Levers(), mask=True) == 2 * 36 + 16 + 24
    assert part("mask", Levers(), mask=True) == 2 * 8
    assert part("mask", Levers()) == 0
    even = small(kv_heads=4)
    assert part("attention", Levers(), shape=even, mask=True) == 2 * 36 + 16 + 24
    packed = part("attention", Levers(), shape=even, mask=True, packed_view=True)
    assert packed == 2 * (12 + 12 + 36) + 16 + 24  # nothing had to be repeated


@pytest.mark.parametrize(
    ("levers", "family", "facts", "widths"),
    [
        # gate, its activation, up, and the product for the down projection
        (Levers(), "llama", {}, 4),
        (FROZEN, "llama", {}, 3),
        (lora("down"), "llama", {}, 4),
        (lora("up"), "llama", {}, 3),
        (Levers(), "llama", {"compiled": True}, 3),
        (FROZEN, "llama", {"compiled": True}, 2),
        # GELU written out keeps four tensors, in one kernel its input
        (Levers(), "gpt2", {}, 5),
        (FROZEN, "gpt2", {}, 4),
        (Levers(), "gpt2", {"fused_activation": True}, 2),
        (Levers(), "gpt2", {"compiled": True}, 2),
        (Levers(), "gpt_neox", {}, 2),
        (FROZEN, "gpt_neox", {}, 1),
        # a ReLU keeps its output, which is the next input
        (Levers(), "opt", {}, 1),
        (FROZEN, "opt", {}, 1),
    ],
)
def test_feed_forward_by_hand(levers: Levers, family: str, facts: dict[str, Any], widths: float) -> None:
    assert part("feed_forward", levers, family, **facts) == 17 * 2 * widths


def test_a_mixture_keeps_the_experts_that_a_token_uses_and_its_routed_inputs() -> None:
    experts = small_mixture()
    assert part("feed_forward", Levers(), shape=experts) == 2 * 17 * 2 * 4 + 2 * 10 * 2
    shared = replace(experts, shared_expert_width=5)
    assert part("feed_forward", Levers(), shape=shared) == (2 * 17 + 5) * 2 * 4 + 2 * 10 * 2
    plain = replace(experts, family="gpt2")
    assert part("feed_forward", Levers(), shape=plain) == 2 * 17 * 2 * 5 + 2 * 10 * 2


@pytest.mark.parametrize(
    ("levers", "family", "software", "size"),
    [
        (Levers(), "llama", PLAIN, 0),
        (FROZEN, "llama", PLAIN, 0),
        # what A makes of the input
        (lora("q", "down"), "llama", PLAIN, 2 * 2 * 2),
        (lora(*ALL_LINEAR), "llama", PLAIN, 7 * 2 * 2),
        (lora("q", "down", dtype="fp32"), "llama", PEFT, 2 * 4 * 2),
        # PEFT's fp32 copies of the inputs
        (lora("q", "down"), "llama", PEFT, 4 * (2 + 2) + 4 * (10 + 17)),
        # the dropped input and its mask
        (lora("q", "down", lora_dropout=True), "llama", PLAIN, 2 * 4 + 3 * (10 + 17)),
        (lora("q", "down", lora_dropout=True), "llama", PEFT, 4 * 4 + 3 * (10 + 17)),
        # one adapter of a packed projection
        (lora("q", "v"), "phi3", PLAIN, 2 * 2),
        (lora("q", "v"), "phi3", PEFT, 4 * 2 + 4 * 10),
        # its update before it is padded with zeros, for each of its parts
        (lora("q", "v"), "phi3", replace(PLAIN, padded_lora=True), 2 * 2 * 2 + 2 * (12 + 6)),
        (lora("k"), "llama", replace(PLAIN, padded_lora=True), 2 * 2 + 2 * 6),
        (lora("down"), "llama", replace(PLAIN, padded_lora=True), 2 * 2),
        (
            lora("q", "down", lora_dropout=True),
            "llama",
            replace(PLAIN, padded_lora=True),
            2 * 4 + 2 * 12 + 3 * 17 + 3 * 10,
        ),
        (lora("down", lora_dropout=True), "llama", replace(PLAIN, padded_lora=True), 2 * 2 + 3 * 17),
    ],
)
def test_adapters_by_hand(levers: Levers, family: str, software: Engine, size: float) -> None:
    assert part("adapters", levers, family, software) == size


def test_adapters_of_experts_work_for_those_that_a_token_uses() -> None:
    experts = small_mixture()
    assert part("adapters", lora("q", "up"), shape=experts) == 2 * 2 * (1 + 2)
    assert part("adapters", lora("up"), shape=experts, software=PEFT) == 4 * 2 * 2 + 4 * 10 * 2
    dropped = part("adapters", lora("up", lora_dropout=True), shape=experts)
    assert dropped == 2 * 2 * 2 + 3 * 10 * 2
