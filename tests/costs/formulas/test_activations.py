"""What one layer keeps for the backward pass, against the tensors that autograd really saves for
Transformers' modules.
"""

from typing import Any

import pytest

from costs.formulas.activations import layer_kept
from costs.formulas.setting import Levers
from costs.tables.engines import ENGINES, Engine, engine
from costs.tables.shapes import ModelShape, from_config

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
    (
        "GPT2Config",
        {"n_embd": 64, "n_head": 4, "vocab_size": 500, "bos_token_id": 1, "eos_token_id": 2},
    ),
    ("GPTNeoXConfig", GATED),
    ("OPTConfig", SIZES | {"ffn_dim": 160, "word_embed_proj_dim": 64}),
    ("PhiConfig", GATED),
    ("StableLmConfig", GATED | {"num_key_value_heads": 4}),
]


def saved_bytes(
    name: str,
    fields: dict[str, Any],
    dtype: str,
    attention: str,
    adapted: list[str] | None,
    padding: int = 0,
) -> tuple[float, ModelShape]:
    """Bytes per token that a third layer adds to what autograd saves, and the shape. Storages that
    several tensors share count once.
    """
    import torch
    import transformers

    totals, config = [], None
    for layers in (2, 3):
        key = "n_layer" if name == "GPT2Config" else "num_hidden_layers"
        config = getattr(transformers, name)(**fields, **{key: layers})
        for dropout in (
            "attn_pdrop",
            "resid_pdrop",
            "embd_pdrop",
            "attention_dropout",
            "hidden_dropout",
            "dropout",
        ):
            if hasattr(config, dropout):
                setattr(config, dropout, 0.0)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention)
        model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).train()
        if adapted:
            import peft

            model = peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules=adapted, lora_dropout=0.0)
            )
        totals.append(_saved(model, torch.randint(0, 500, (BATCH, TOKENS)), padding))
    assert config is not None
    return (totals[1] - totals[0]) / (BATCH * TOKENS), from_config(config.to_dict(), name)


def _saved(model: Any, ids: Any, padding: int) -> float:
    import torch

    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
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
def test_a_layer_keeps_what_autograd_saves(
    name: str, fields: dict[str, Any], dtype: str, attention: str
) -> None:
    measured, shape = saved_bytes(name, fields, dtype, attention, None)
    levers = Levers(dtype=dtype, attention="eager" if attention == "eager" else "sdpa")
    assert sum(layer_kept(shape, levers, engine("ours"), TOKENS).values()) == pytest.approx(
        measured, rel=0.01
    )


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
    ("adapted", "modules"),
    [(["q_proj", "v_proj"], ("q", "v")), (ALL, ("q", "k", "v", "o", "gate", "up", "down"))],
)
def test_a_layer_with_lora_keeps_what_autograd_saves(
    adapted: list[str], modules: tuple[str, ...], dtype: str
) -> None:
    measured, shape = saved_bytes("LlamaConfig", GATED, dtype, "sdpa", adapted)
    levers = Levers(dtype=dtype, tuning="lora", lora_rank=4, lora_modules=modules)
    assert sum(layer_kept(shape, levers, engine("ours"), TOKENS).values()) == pytest.approx(
        measured, rel=0.01
    )


def test_a_gpt_layer_in_16_bit_with_dropout_keeps_34_d_and_5_heads_s() -> None:
    # arXiv 2205.05198 equation 1, of fused kernels: GELU in one piece, softmax in 16 bit as GPT-2
    # has it
    shape = from_config(
        {
            "model_type": "gpt2",
            "n_embd": 1024,
            "n_layer": 1,
            "n_head": 16,
            "vocab_size": 100,
            "n_positions": 64,
        },
        "gpt",
    )
    fused = Engine("fused", fused_activation=True, fused_norm=True)
    kept = layer_kept(shape, Levers(dtype="fp16", attention="eager", dropout=True), fused, 512)
    assert sum(kept.values()) == pytest.approx(34 * 1024 + 5 * 16 * 512, rel=0.01)


def test_frozen_linear_layers_keep_no_input() -> None:
    shape = from_config({"model_type": "llama", **GATED, "num_hidden_layers": 1}, "llama")
    frozen = layer_kept(shape, Levers(tuning="lora", lora_modules=("q",)), ENGINES["ours"], TOKENS)
    assert "projections" not in frozen
    assert layer_kept(shape, Levers(), ENGINES["ours"], TOKENS)["projections"] == 2 * 64 * 2
