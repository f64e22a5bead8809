"""Bytes kept by a forward pass until its backward pass, and copies made by kernels."""

from dataclasses import replace

from costs.formulas.activations import layer_kept
from costs.formulas.setting import DTYPE_BYTES, Levers, Setting
from costs.formulas.sharding import sharding_of
from costs.tables.shapes import ModelShape


def kept_per_token(setting: Setting, shape: ModelShape, levers: Levers, tokens: int) -> float:
    """Bytes per token that one layer keeps."""
    kept = layer_kept(shape, computing(setting, levers), setting.engine, tokens, setting.mask_tensor)
    places = setting.workload.attention_places
    if places > 1:  # what attention keeps it keeps at each place, and its outputs are collected
        kept["attention"] = places * kept["attention"] + shape.query_width * levers.dtype_bytes
    return sum(kept.values())


def computing(setting: Setting, levers: Levers) -> Levers:
    """`levers` as the layers see them: under FSDP's mixed precision weights are 16-bit when they are used, so the
    residual stream is too; under autocast it is fp32, as the embedding is. Source: arXiv 2304.11277 section 4.4.
    """
    row = sharding_of(setting)
    if not levers.mixed or not row.micro_gathers or row.fsdp2:
        return levers
    return replace(levers, weights_fp32=False)


def layer_inputs(levers: Levers, shape: ModelShape) -> float:
    """Bytes per token of one layer's input: all that full checkpointing keeps (arXiv 2205.05198 section 5)."""
    return shape.width * (4.0 if levers.mixed else levers.dtype_bytes)


def activation_bytes(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int) -> float:
    """Bytes kept between forward and backward pass for `sequences` of `tokens` tokens."""
    total = sequences * tokens
    if levers.checkpointing == "none":
        stack = shape.layers * kept_per_token(setting, shape, levers, tokens)
    else:
        stack = shape.layers * layer_inputs(computing(setting, levers), shape)
    # the final norm's input and output
    ends = 2 * shape.width * levers.dtype_bytes + 4 * shape.width
    spared = 0.0
    if levers.checkpointing != "full":  # a recomputed layer keeps its full input
        kept = layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor)
        spared = kept.get("feed_forward", 0.0) + kept.get("norms", 0.0) / shape.norms
    return total * (stack + ends) - spared_tokens(setting, shape, levers, total) * spared


NARROWED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose last layer our stages compute at needed tokens only: RESIDUAL_LAYERS of
training/modeling/last_layer.py.
"""


def spared_tokens(setting: Setting, shape: ModelShape, levers: Levers, tokens: float) -> float:
    """How many of `tokens` in packed rows skip the last layer's feed-forward part."""
    if not narrows(setting, shape, levers):
        return 0.0
    return tokens * (1 - setting.workload.read_tokens)


def narrows(setting: Setting, shape: ModelShape, levers: Levers) -> bool:
    """Whether the last layer's feed-forward part runs at the tokens alone whose hidden states are read."""
    return setting.engine.packs and shape.family in NARROWED and levers.attention != "eager"


def recomputed_bytes(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int) -> float:
    """Bytes of the layer whose activations are recomputed, or in use, during its backward pass."""
    rebuilt = 0.0
    if levers.checkpointing == "full":
        rebuilt = kept_per_token(setting, shape, levers, tokens)
    active = 2 * ((shape.experts_per_token * shape.expert_width or shape.mlp_width) + shape.width) * levers.dtype_bytes
    # the gradients of the softmax's output and of its input, when the feed-forward part's tensors are gone
    if levers.attention == "eager":
        kept = layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor)
        active = max(active, 2 * shape.heads * tokens * levers.dtype_bytes - kept.get("feed_forward", 0.0))
    total = sequences * tokens
    if shape.layers > 1:
        return total * (rebuilt + active)
    # the only layer is the last one
    kept = layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor)
    layer_bytes = active + kept.get("feed_forward", 0.0) * (levers.checkpointing == "full")
    return total * (rebuilt + active) - spared_tokens(setting, shape, levers, total) * layer_bytes


def workspace(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Copies that kernels make: the largest quantised matrix in 16 bit, twice, while it is multiplied forward and
    backward; none where a compiler puts unpacking into the product.
    """
    if levers.quantisation is None:
        return 0.0
    if setting.engine.compiled and not levers.quantisation.startswith("nf4"):
        return 0.0
    head = shape.vocab * shape.width if setting.engine.quantises_head else 0
    return 2 * DTYPE_BYTES["bf16"] * max(head, shape.width * max(shape.mlp_width, shape.query_width))
