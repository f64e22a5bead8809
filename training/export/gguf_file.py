"""A language model as a GGUF file, which llama.cpp reads, in f32, q8_0 or q4_0.

Matrices whose rows divide into blocks of 32 are quantised, norms and other vectors stay f32. Names and values of the
keys are those of ggml's own package `gguf`; architectures that are not listed in ARCHITECTURES are refused, as nothing
here has compared them with Transformers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from config.errors import ModelError
from training.modeling.tokenizer import end_of_turn

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
BLOCK = 32
"""Weights per scale in q8_0 and q4_0."""
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
INTERLEAVED = ("llama",)
"""Architectures whose rotary dimensions llama.cpp pairs as neighbours and Transformers as halves: the rows of their
query and key matrices are put in another order.
"""
WRITTEN = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias",
    }
)  # fmt: skip
"""Settings of a model that its file carries, as keys or as tensors."""
WITHOUT_EFFECT = frozenset(
    {
        "initializer_range", "attention_dropout", "use_cache", "pretraining_tp", "layer_types",
        "sliding_window", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id",
    }
)  # fmt: skip
"""Settings that do not matter to replies, unless another one says that they do."""
SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
}
"""llama.cpp's names of the expressions that split text before BPE (llama_vocab_pre_type)."""
ELSEWHERE = "Serve the model with --engine vllm."


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str, target: Path) -> None:
    """Write `model` to `target`, a file of the type f32, q8_0 or q4_0.

    The file carries the vocabulary and the chat template; `training.export.parity` finds out whether llama.cpp makes
    the same of them as training did.

    Raises ModelError for an architecture or a tokenizer that this cannot write.
    """
    architecture = str(model.config.model_type)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"a model of type {architecture} cannot be written as GGUF; known: {', '.join(ARCHITECTURES)}. {ELSEWHERE}"
        )
    writer = gguf.GGUFWriter(target, architecture)
    _add_shape(writer, model.config)
    writer.add_file_type(FILE_TYPES[kind])
    _add_vocabulary(writer, tokenizer, model.config.vocab_size)
    for name, data in tensors(model):
        is_matrix = data.ndim == 2 and data.shape[1] % BLOCK == 0
        if kind != "f32" and is_matrix:
            writer.add_tensor(name, quantize(data, TYPES[kind]), raw_dtype=TYPES[kind])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's name and the fp32 values of every weight."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for place, weight in model.state_dict().items():
        if place == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(place, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(f"{place} has no counterpart in a GGUF file of type {config.model_type}. {ELSEWHERE}")
        yield name, _rotated(place, weight, config).float().cpu().numpy()


def _rotated(place: str, weight: Tensor, config: Any) -> Tensor:
    """Query and key rows as llama.cpp orders them: dimension i of the first half of a head beside dimension i of the
    second half.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(place.split(".")[-2])
    if config.model_type not in INTERLEAVED or heads is None:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    _check(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _check(config: Any) -> None:
    """Raise ModelError for a setting that changes replies and that the file cannot carry."""
    usual = type(config)().to_dict()
    carried = WRITTEN | WITHOUT_EFFECT | PreTrainedConfig().to_dict().keys()
    lost = {
        name: value
        for name, value in config.to_dict().items()
        if name in usual.keys() - carried and value != usual[name]
    }
    lost |= {
        f"rope_parameters.{name}": value
        for name, value in config.rope_parameters.items()
        if name != "rope_theta" and value not in ("default", None, 1.0)
    }
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windows:
        lost["layer_types"] = ", ".join(windows)
    for name, value in lost.items():
        raise ModelError(
            f"a model with {name}={value} cannot be written as GGUF: llama.cpp would reply without it. {ELSEWHERE}"
        )


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Tokens by id; ids beyond the tokenizer's are unused."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(content["decoder"]):
        raise ModelError(
            f"a tokenizer of type {content['model']['type']} cannot be written as GGUF; byte-level "
            f"BPE can. {ELSEWHERE}"
        )
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"<unused_{number}>") for number in range(vocab_size)]
    kinds = [
        gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.NORMAL
        if number in by_id
        else gguf.TokenType.UNUSED
        for number, token in enumerate(tokens)
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(content["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template is not None:
        # llama.cpp puts a system turn into the user's unless the template reads the first content
        writer.add_chat_template("{% set first = messages[0]['content'] %}" + str(tokenizer.chat_template))
    if (end := end_of_turn(tokenizer)) is not None:
        writer.add_eot_token_id(tokenizer.convert_tokens_to_ids(end))


def _split(pre_tokenizer: Any) -> str:
    """llama.cpp's name of a pre-tokenizer. Raises ModelError for one that it does not have."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for part in parts:
        if part["type"] == "Split":
            expression = part["pattern"].get("Regex")
            if expression not in SPLITS:
                raise ModelError(
                    f"llama.cpp has no name for the tokenizer's expression {expression!r:.60}, "
                    f"which splits text into words. {ELSEWHERE}"
                )
            return SPLITS[expression]
    return "smollm" if any(part["type"] == "Digits" for part in parts) else "gpt-2"
