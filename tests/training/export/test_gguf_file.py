"""GGUF files in llama.cpp's own server, beside the same model in Transformers."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from config.errors import ModelError
from tests.training.support.tiny import CONTEXT, policy, prompts, tokenizer
from training.export.gguf_file import write_gguf
from training.export.llama_cpp import greedy_replies, serving

NEW_TOKENS = 20


def by_transformers(model: PreTrainedModel, ids: list[int]) -> list[int]:
    eos = tokenizer().eos_token_id
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos,
            pad_token_id=tokenizer().pad_token_id,
        )  # fmt: skip
    result: list[int] = tokens[0, len(ids) :].tolist()
    return result


@pytest.mark.integration
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_replies_token_for_token_as_transformers_does(tmp_path: Path, family: str) -> None:
    model, held_out = policy(seed=3, family=family), prompts(40)
    write_gguf(model, tokenizer(), "f32", tmp_path / "model.gguf")
    with serving(tmp_path / "model.gguf", CONTEXT) as address:
        result = greedy_replies(address, held_out, NEW_TOKENS, tokenizer().eos_token_id)
    assert result == [by_transformers(model, ids) for ids in held_out]
    assert len({tuple(reply) for reply in result}) > 5, "the replies tell the prompts apart"


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 8.5), ("q4_0", 4.5)])
def test_matrices_are_quantised_in_blocks_and_vectors_are_not(tmp_path: Path, kind: str, bits: float) -> None:
    write_gguf(policy(), tokenizer(), kind, tmp_path / "model.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        if "norm" in tensor.name:
            assert tensor.tensor_type.name == "F32"
        else:
            assert tensor.n_bytes * 8 / tensor.n_elements == bits, tensor.name


def test_the_vocabulary_is_filled_up_and_special_tokens_are_marked(tmp_path: Path) -> None:
    model = policy()
    write_gguf(model, tokenizer(), "f32", tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(kinds) == model.config.vocab_size
    assert tokens[:4] == ["<pad>", "<bos>", "<eos>", "<spare>"]
    assert kinds[:4] == [gguf.TokenType.CONTROL] * 4
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer().eos_token_id


def test_an_architecture_that_was_never_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gpt2 cannot be written as GGUF; known: llama, qwen2"):
        write_gguf(policy(family="gpt2"), tokenizer(), "f32", tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         "rope_parameters.rope_type=linear"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
         "partial_rotary_factor=0.5"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, family: str, settings: dict[str, Any], told: str) -> None:
    model = policy(family=family)
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=told):
        write_gguf(model, tokenizer(), "f32", tmp_path / "model.gguf")
