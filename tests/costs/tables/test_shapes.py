"""Parameter counts against Transformers' own modules (built on the meta device, no memory) and against published
totals.
"""

import pytest

from config.errors import CostError
from costs.tables.catalogue import shape
from costs.tables.shapes import from_config

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 172}
PLAIN = SIZES | {"intermediate_size": 256}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 128}
OPT = SIZES | {"ffn_dim": 256, "max_position_embeddings": 128}

CONFIGS = [
    ("LlamaConfig", GROUPED),
    ("LlamaConfig", GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("MistralConfig", GROUPED),
    ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Qwen2Config", GROUPED),
    (
        "Qwen2MoeConfig",
        GROUPED | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96, "num_experts": 6},
    ),
    ("Qwen3Config", GROUPED | {"head_dim": 32}),
    ("Qwen3MoeConfig", GROUPED | {"moe_intermediate_size": 48, "num_experts": 6, "head_dim": 16}),
    ("GemmaConfig", GROUPED | {"head_dim": 32}),
    ("Gemma2Config", GROUPED | {"head_dim": 32}),
    ("Gemma3TextConfig", GROUPED | {"head_dim": 32}),
    ("GPT2Config", GPT | {"bos_token_id": 1, "eos_token_id": 2}),
    ("GPTNeoXConfig", PLAIN),
    ("OPTConfig", OPT | {"word_embed_proj_dim": 64}),
    ("OPTConfig", OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("PhiConfig", PLAIN),
    ("Phi3Config", GROUPED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    ("StableLmConfig", PLAIN | {"num_key_value_heads": 4}),
    ("FalconConfig", SIZES),
    ("FalconConfig", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("BloomConfig", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500}),
    ("MptConfig", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 500}),
]


@pytest.mark.parametrize(
    ("name", "fields"), CONFIGS, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CONFIGS)]
)
def test_parameters_are_those_of_the_module(name: str, fields: dict[str, object]) -> None:
    import torch
    import transformers

    config = getattr(transformers, name)(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert from_config(config.to_dict(), name).parameters == sum(p.numel() for p in model.parameters())


def test_an_encoder_is_counted_with_its_masked_language_head() -> None:
    import torch
    import transformers

    config = transformers.BertConfig(**PLAIN, max_position_embeddings=128)
    with torch.device("meta"):
        model = transformers.AutoModelForMaskedLM.from_config(config)
    model.tie_weights()
    assert from_config(config.to_dict(), "bert").parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-2-7b-hf", 6_738_415_616),  # arXiv 2307.09288: "7B"; the number its own checkpoint has
        ("gpt2", 124_439_808),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),  # printed in the torchtune README
        ("EleutherAI/pythia-6.9b", 6_857_302_016),  # arXiv 2304.01373 table 1
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_named_shapes_have_their_published_parameters(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


def test_a_mixture_has_all_experts_but_a_token_meets_two() -> None:
    mixtral = shape("mixtral-8x7b")
    # arXiv 2401.04088 section 2: 47B, 13B active
    assert mixtral.parameters == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=5e-3)


def test_an_unknown_architecture_says_where_to_add_it() -> None:
    with pytest.raises(CostError, match=r"model_type='mamba'.*FAMILIES in costs/tables/families.py"):
        from_config({"model_type": "mamba", "hidden_size": 64}, "a model")


def test_a_config_without_widths_is_refused() -> None:
    with pytest.raises(CostError, match="hidden_size"):
        from_config({"model_type": "llama", "num_hidden_layers": 2}, "a model")


def test_an_unknown_model_name_suggests_the_nearest() -> None:
    with pytest.raises(CostError, match=r"Did you mean llama-3-8b[,?].*costs/tables/shapes.yaml"):
        shape("meta-llama/Llama-3-8bb")
