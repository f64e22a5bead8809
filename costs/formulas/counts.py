"""Work of a pass through a model: floating-point operations, bytes moved, operations launched. Pure functions.

A multiply-add counts two FLOPs. Sources: arXiv 2001.08361 section 2.1 (2 N per token forward, twice that backward),
arXiv 2205.05198 appendix A (attention), arXiv 2204.02311 appendix B (MFU),
arXiv 2205.14135 section 3 (attention's traffic).
"""

from costs.formulas.setting import QUANT_BYTES, Levers, Setting
from costs.formulas.states import trained_parameters
from costs.tables.engines import Engine
from costs.tables.shapes import ModelShape


def forward_matmul_flops(shape: ModelShape, tokens: float, vocabulary_tokens: float | None = None) -> float:
    """2 x active weights x tokens, the output head at `vocabulary_tokens` of them (all if None). Source: arXiv
    2001.08361 table 1.
    """
    head = shape.vocab * (shape.embedding_width or shape.width)
    head_tokens = tokens if vocabulary_tokens is None else vocabulary_tokens
    return 2 * (shape.layers * shape.active_layer_parameters * tokens + head * head_tokens)


def forward_attention_flops(shape: ModelShape, sequences: float, tokens: float, causal: bool = True) -> float:
    """Scores and weighted values: 4 x query width x tokens^2 a layer and sequence; half of it under a causal mask that
    is exploited.

    Source: arXiv 2205.05198 appendix A (4 b s^2 h).
    """
    return shape.layers * sequences * 4 * shape.query_width * tokens**2 * (0.5 if causal else 1.0)


def training_flops(
    shape: ModelShape,
    levers: Levers,
    sequences: float,
    tokens: float,
    loss_tokens: float = 1.0,
    spared: float = 0.0,
    causal: bool = True,
    head_again: bool = False,
    places: float = 1.0,
) -> tuple[float, float]:
    """(matrix, attention) FLOPs of forward, recomputation and backward pass; the last layer's feed-forward part is
    spared `spared` tokens, `causal` attention the scores above the diagonal, and the backward pass of a loss that
    keeps no logits makes them once more (`head_again`). Attention has `places` for each token.

    Backward is twice the forward for full fine-tuning; with frozen weights only the gradients of the inputs are
    computed: once. Flash attention recomputes its scores in the backward pass: 2.5 times the forward (arXiv 2307.08691
    section 3.1).
    """
    total = sequences * tokens
    less = spared_flops(shape, spared)
    matmul = forward_matmul_flops(shape, total, total * loss_tokens) - less
    layers = forward_matmul_flops(shape, total, 0.0) - less
    attention = forward_attention_flops(shape, sequences, tokens * places, causal and levers.attention != "eager")
    again = layers if levers.checkpointing == "full" else 0.0
    again += (matmul - layers) * head_again
    passes = 3.0 if levers.tuning == "full" else 2.0
    adapters = 6 * parameters_per_token(shape, levers) * total if levers.tuning != "full" else 0.0
    backward = 2.5 if levers.attention != "eager" else 2.0
    attention_passes = 1 + backward + (levers.checkpointing == "full")
    return passes * matmul + again + adapters, attention * attention_passes


def parameters_per_token(shape: ModelShape, levers: Levers) -> float:
    """Trained parameters multiplied with a token: of adapters on a mixture's experts, k of E."""
    if levers.tuning != "lora" or not shape.experts:
        return trained_parameters(shape, levers)
    adapted = shape.adapted(levers.lora_modules, shape.traits.packed_qkv)
    return shape.layers * sum(levers.lora_rank * (i + o) * used for i, o, used in adapted.values())


def spared_flops(shape: ModelShape, tokens: float) -> float:
    """2 x one layer's feed-forward weights x the tokens at which the last layer's does not run."""
    return 2 * shape.feed_forward_parameters * tokens


def mfu(shape: ModelShape, tokens_per_second: float, sequence: float, peak_flops_per_second: float) -> float:
    """Model FLOPs utilisation: (6 N + 12 layers d s) per token over the peak, with all parameters used by a token: in
    a mixture, those of its experts. Source: arXiv 2204.02311 appendix B.
    """
    return (
        tokens_per_second
        * (6 * shape.active_parameters + 12 * shape.layers * shape.query_width * sequence)
        / peak_flops_per_second
    )


def pointwise_bytes(shape: ModelShape, levers: Levers, engine: Engine, tokens: float) -> float:
    """Traffic of norms, activations, rotary positions and residuals in one forward pass: each operation reads and
    writes its tensors.

    Eager Transformers passes over a width-d tensor about 24 times a layer and over a width-f one about 6 times (RMS
    norm in fp32, rotary positions in five operations, gate and product apart); `engine.pointwise` says how much of it
    fused kernels leave.
    """
    d, b = shape.width, levers.dtype_bytes
    f = shape.experts_per_token * shape.expert_width or shape.mlp_width
    return shape.layers * tokens * b * (24.0 * d + _feed_forward_passes(shape, engine) * f) * _unfused(engine)


def spread_bytes(setting: Setting, shape: ModelShape, levers: Levers, tokens: float) -> float:
    """Traffic of copying queries, keys and values to attention's places, and outputs back, in one forward pass; none
    if every token has one place.
    """
    places = setting.workload.attention_places
    if places == 1:
        return 0.0
    width = 2 * shape.query_width + 2 * shape.kv_width
    return shape.layers * tokens * levers.dtype_bytes * width * (1 + places)


def _feed_forward_passes(shape: ModelShape, engine: Engine) -> float:
    """Over a tensor of the feed-forward width: activation and gate. GELU's tanh form, written out, is eight
    operations.
    """
    if shape.traits.gated:
        return 6.0
    return 3.0 if engine.fused_activation or not shape.traits.tanh_gelu else 18.0


def spared_bytes(shape: ModelShape, levers: Levers, engine: Engine, tokens: float) -> float:
    """The part of `pointwise_bytes` spent on the feed-forward part at tokens where the last layer's does not run: half
    of the passes over width d.
    """
    passes = _feed_forward_passes(shape, engine)
    return tokens * levers.dtype_bytes * (12.0 * shape.width + passes * shape.mlp_width) * _unfused(engine)


def _unfused(engine: Engine) -> float:
    return 0.42 if engine.compiled else engine.pointwise


def logits_traffic(shape: ModelShape, tokens: float) -> float:
    """The loss reads and writes its logits: about as many bytes as `dense` holds, twice."""
    return 2 * 14 * shape.vocab * tokens


def held_weight_bytes(shape: ModelShape, levers: Levers) -> float:
    """Bytes of weights that one pass through the layers and the head reads."""
    weights = shape.layers * shape.active_layer_parameters + shape.vocab * shape.width
    return weights * (QUANT_BYTES[levers.quantisation] if levers.quantisation else levers.dtype_bytes)


def dequantised_bytes(shape: ModelShape, levers: Levers) -> float:
    """Traffic of converting the 4-bit weights to 16 bits once: read the packed, write the plain ones."""
    if not levers.quantisation or not levers.quantisation.startswith("nf4"):
        return 0.0
    return shape.layers * shape.layer_matrix_parameters * (QUANT_BYTES[levers.quantisation] + 2.0)


def experts_read(shape: ModelShape, tokens: float) -> float:
    """Expected share of a layer's experts that `tokens` tokens are routed to: 1 - (1 - k/E)^n of E experts, k a token,
    where each token draws its experts evenly and apart from the others.

    Source: the coupon collector's expectation; k of E at random is what a balancing loss aims at (arXiv 2101.03961
    section 2.2).
    """
    if not shape.experts:
        return 1.0
    return 1 - (1 - shape.experts_per_token / shape.experts) ** tokens


def unpacked_bytes(shape: ModelShape, levers: Levers) -> float:
    """Traffic of turning int8 or 4-bit integer weights (GPTQ, AWQ, LLM.int8) into 16-bit ones once for a product over
    many tokens: a multiplication and a cast, at the bandwidth; NF4's table look-up is slower, see `dequantised_bytes`.
    """
    if levers.quantisation not in ("int8", "int4"):
        return 0.0
    return shape.layers * shape.layer_matrix_parameters * (QUANT_BYTES[levers.quantisation] + 2.0)


def launched(setting: Setting, shape: ModelShape, levers: Levers, backward: bool) -> float:
    """Small operations of one pass through the model."""
    engine = setting.engine
    packed = shape.traits.packed_qkv and not engine.padded_lora
    adapted = len(shape.adapted(levers.lora_modules, packed)) if levers.tuning == "lora" else 0
    quantised = (
        len(shape.matrices) if levers.quantisation and levers.quantisation.startswith("nf4") and not backward else 0
    )
    forward = plain_operations(setting, shape) + shape.layers * (
        engine.lora_ops * adapted + engine.quantised_ops * quantised
    )
    again = forward if backward and levers.checkpointing == "full" else 0.0
    # a backward node launches one to two kernels for each forward one
    return forward * (2.8 if backward else 1.0) + again


def plain_operations(setting: Setting, shape: ModelShape) -> float:
    """Small operations of a forward pass through a model without adapters or quantisation."""
    return shape.layers * setting.engine.layer_ops + 20
