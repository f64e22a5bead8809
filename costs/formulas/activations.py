"""Activations kept for the backward pass: bytes per token of one transformer layer, part by part.

Counted from the code of the layers, operation by operation: autograd keeps an operation's input only if the gradient
of another input needs it, so a linear layer with a frozen weight keeps nothing. Confirmed with saved-tensor hooks on
Transformers' own modules in tests/costs/formulas/test_activations.py. For GPT-like layers in 16 bit with eager
attention the sum is `32 d + 2 heads s` bytes, as in arXiv 2205.05198 equation 1 without dropout.

d width, q query width, k key and value width, f feed-forward width, b bytes of the compute type, s tokens of the
sequence.
"""

from costs.formulas.setting import Levers
from costs.tables.engines import Engine
from costs.tables.shapes import ModelShape

TANH_GELU_COPIES = 4.0
"""Feed-forward widths kept by GELU's tanh form as separate operations, besides its output: its input, tanh, and both
factors.
"""

_PARTIAL_ROTARY = ("gpt_neox", "phi", "stablelm")
"""Queries are concatenated from a rotated and a plain part, in a memory layout that causes a copy of the attention
output.
"""


def layer_kept(
    shape: ModelShape, levers: Levers, engine: Engine, tokens: int, mask_tensor: bool = False
) -> dict[str, float]:
    """Bytes per token that one layer keeps for the backward pass, by part: norms, projections, attention, mask,
    feed_forward, adapters.
    """
    parts = {
        "norms": _norms(shape, levers, engine),
        "projections": _linear_inputs(shape, levers, engine),
        "attention": _attention(shape, levers, engine, tokens, mask_tensor),
        "mask": levers.dtype_bytes * tokens * mask_tensor,  # cast to the compute type in each layer
        "feed_forward": _feed_forward(shape, levers, engine),
        "adapters": _adapters(shape, levers, engine),
    }
    return {name: value for name, value in parts.items() if value}


def _stream_bytes(levers: Levers) -> float:
    """The residual stream is fp32 under mixed precision with fp32 weights."""
    return 4.0 if levers.mixed else levers.dtype_bytes


def _keeps_input(levers: Levers, engine: Engine, *modules: str) -> bool:
    """Whether a linear layer over these matrices keeps its input."""
    if levers.quantisation and engine.quantised_keeps_input:
        return True
    adapted = levers.tuning == "lora" and any(module in levers.lora_modules for module in modules)
    return levers.tuning == "full" or (adapted and not levers.lora_dropout and not _casts_lora_input(levers, engine))


def _casts_lora_input(levers: Levers, engine: Engine) -> bool:
    return bool(engine.lora_input_bytes) and levers.dtype_bytes < engine.lora_input_bytes


def _norms(shape: ModelShape, levers: Levers, engine: Engine) -> float:
    d, stream = shape.width, _stream_bytes(levers)
    trained = levers.tuning == "full"
    if shape.traits.fused_norm or engine.fused_norm or engine.compiled:
        # parallel branches normalise the same tensor
        inputs = 1 if shape.traits.parallel else shape.norms
        return inputs * d * stream + 8 * shape.norms
    # Gemma multiplies by the weight before casting back
    wide = 4.0 if shape.family.startswith("gemma") or engine.wide_norm else stream
    weighted = wide * d if trained else 0.0
    return shape.norms * (4 * d + weighted + 4)


def _linear_inputs(shape: ModelShape, levers: Levers, engine: Engine) -> float:
    """The normalised inputs of the attention and feed-forward projections; the other inputs are kept by attention and
    feed-forward.
    """
    d, b = shape.width, levers.dtype_bytes
    up = ("gate", "up") if shape.traits.gated else ("up",)
    attention = _keeps_input(levers, engine, "q", "k", "v")
    feed_forward = _keeps_input(levers, engine, *up)
    if shape.traits.parallel and shape.norms == 1:
        return d * b * float(attention or feed_forward)
    # autocast casts once per linear layer
    copies = (3 if not shape.traits.packed_qkv else 1, len(up)) if levers.mixed else (1, 1)
    return d * b * (attention * copies[0] + feed_forward * copies[1])


def _attention(shape: ModelShape, levers: Levers, engine: Engine, tokens: int, mask_tensor: bool) -> float:
    q, k, b, heads = shape.query_width, shape.kv_width, levers.dtype_bytes, shape.heads
    projected = float(_keeps_input(levers, engine, "o"))
    head_norms = (q + k) * (4 + b * (levers.tuning == "full")) if shape.traits.qk_norm else 0.0
    if levers.attention == "eager":
        # most families take the softmax in fp32 and cast back
        cast = 0.0 if b == 4 or shape.family in ("gpt2", "falcon") else 4.0
        cap = b if shape.family == "gemma2" else 0.0  # the soft cap's tanh
        return 3 * b * q + heads * tokens * (b + cast + cap) + b * q * projected + head_norms
    # Transformers: with a mask grouped queries would take the slow kernel
    repeated = (engine.repeats_kv or mask_tensor or shape.family == "falcon") and heads != shape.kv_heads
    keys = q if repeated else k
    packed = (engine.packed_view or shape.family == "gpt_neox") and not engine.compiled and not repeated
    values = q + 2 * k if packed else keys
    # four bytes per head: the logarithm of the softmax sum
    kept = b * (q + keys + values) + 4 * heads + head_norms
    copied = (engine.attention_copy or shape.family in _PARTIAL_ROTARY) and not engine.compiled
    return kept + b * q * (1 + projected * copied)


def _feed_forward(shape: ModelShape, levers: Levers, engine: Engine) -> float:
    b = levers.dtype_bytes
    f = shape.experts_per_token * shape.expert_width + shape.shared_expert_width if shape.experts else shape.mlp_width
    routed = shape.experts_per_token * shape.width * b if shape.experts else 0.0
    down = float(_keeps_input(levers, engine, "down"))
    if shape.traits.gated:
        # compiled: gate, up and product; eager: gate, its activation, up, and the product for the down projection
        return f * b * ((2 + down) if engine.compiled else (3 + down)) + routed
    inner = 1.0 if engine.compiled or engine.fused_activation else TANH_GELU_COPIES if shape.traits.tanh_gelu else 1.0
    relu = shape.family == "opt"
    # a ReLU keeps its output, which is the input of the down projection
    return f * b * (1.0 if relu else inner + down) + routed


def _adapters(shape: ModelShape, levers: Levers, engine: Engine) -> float:
    d, b = shape.width, levers.dtype_bytes
    if levers.tuning != "lora":
        return 0.0
    kept = 0.0
    cast = _casts_lora_input(levers, engine)
    packed = engine.padded_lora and any(module in levers.lora_modules for module in ("q", "k", "v"))
    for name, (inputs, outputs, used) in shape.adapted(
        levers.lora_modules, shape.traits.packed_qkv and not engine.padded_lora
    ).items():
        kept += (engine.lora_input_bytes if cast else b) * levers.lora_rank * used
        if packed and name in ("q", "k", "v"):
            kept += b * outputs  # the update before zero_pad
        elif levers.lora_dropout:
            kept += (b + 1) * inputs * used
        elif cast:
            kept += engine.lora_input_bytes * inputs * used
    return kept + (b + 1) * d * (packed and levers.lora_dropout)
