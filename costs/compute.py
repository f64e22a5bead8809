"""Floating-point operations and bytes moved, as pure functions.

A multiply-add counts two FLOPs. Sources: arXiv 2001.08361 section 2.1 (2 N per token forward, twice that backward),
arXiv 2205.05198 appendix A (attention), arXiv 2204.02311 appendix B (MFU), arXiv 2205.14135 section 3 (attention's traffic).
"""

from typing import NamedTuple

from costs.engines import Engine
from costs.measured import CACHE_PASSES, Measured
from costs.memory import shards, spared_tokens, state_bytes, trained_parameters, weights
from costs.setting import DTYPE_BYTES, QUANT_BYTES, Levers, Setting
from costs.shapes import ModelShape


class Work(NamedTuple):
    """What a phase asks of one device; sums of it add up."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    bytes_moved: float = 0.0
    """To and from device memory, by operations that are not matrix products of large matrices."""
    weight_bytes: float = 0.0
    """Weights read by matrix products; hidden behind them where the batch is large."""
    dequantised_bytes: float = 0.0
    """Written and read to turn quantised weights into 16-bit ones."""
    operations: float = 0.0
    """Small operations launched by the host."""
    communicated_bytes: float = 0.0
    """Sent by each device."""
    messages: float = 0.0
    paged_bytes: float = 0.0
    """Between host and device memory."""
    calibrated_seconds: float = 0.0
    """All of the above but communication, at the rates that were measured on this machine; 0 where none were."""

    def __add__(self, other: object) -> "Work":
        if not isinstance(other, Work):
            return NotImplemented
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Work":
        return Work(*(factor * a for a in self))

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    @property
    def total_bytes(self) -> float:
        return self.bytes_moved + self.weight_bytes + self.dequantised_bytes


def forward_matmul_flops(shape: ModelShape, tokens: float, vocabulary_tokens: float | None = None) -> float:
    """2 x active weights x tokens, the output head at `vocabulary_tokens` of them (all if None). Source: arXiv 2001.08361 table 1."""
    head = shape.vocab * (shape.embedding_width or shape.width)
    head_tokens = tokens if vocabulary_tokens is None else vocabulary_tokens
    return 2 * (shape.layers * shape.active_layer_parameters * tokens + head * head_tokens)


def forward_attention_flops(shape: ModelShape, sequences: float, tokens: float, causal: bool = True) -> float:
    """Scores and weighted values: 4 x query width x tokens^2 a layer and sequence; half of it under a causal mask that is exploited.

    Source: arXiv 2205.05198 appendix A (4 b s^2 h).
    """
    return shape.layers * sequences * 4 * shape.query_width * tokens**2 * (0.5 if causal else 1.0)


def training_flops(
    shape: ModelShape, levers: Levers, sequences: float, tokens: float, loss_tokens: float = 1.0, spared: float = 0.0
) -> tuple[float, float]:
    """(matrix, attention) FLOPs of forward, recomputation and backward pass; the last layer's feed-forward part is spared `spared` tokens.

    Backward is twice the forward for full fine-tuning; with frozen weights only the gradients of the inputs are computed: once.
    Flash attention recomputes its scores in the backward pass: 2.5 times the forward (arXiv 2307.08691 section 3.1).
    """
    total = sequences * tokens
    less = spared_flops(shape, spared)
    matmul = forward_matmul_flops(shape, total, total * loss_tokens) - less
    layers = forward_matmul_flops(shape, total, 0.0) - less
    attention = forward_attention_flops(shape, sequences, tokens, levers.attention != "eager")
    again = layers if levers.checkpointing == "full" else 0.0
    passes = 3.0 if levers.tuning == "full" else 2.0
    adapters = 6 * trained_parameters(shape, levers) * total if levers.tuning != "full" else 0.0
    backward = 2.5 if levers.attention != "eager" else 2.0
    attention_passes = 1 + backward + (levers.checkpointing in ("full", "selective"))
    return passes * matmul + again + adapters, attention * attention_passes


def spared_flops(shape: ModelShape, tokens: float) -> float:
    """2 x one layer's feed-forward weights x the tokens at which the last layer's does not run."""
    return 2 * shape.feed_forward_parameters * tokens


def mfu(shape: ModelShape, tokens_per_second: float, sequence: float, peak_flops_per_second: float) -> float:
    """Model FLOPs utilisation: (6 N + 12 layers d s) per token over the peak, with all parameters. Source: arXiv 2204.02311 appendix B."""
    return tokens_per_second * (6 * shape.parameters + 12 * shape.layers * shape.query_width * sequence) / peak_flops_per_second


def pointwise_bytes(shape: ModelShape, levers: Levers, engine: Engine, tokens: float) -> float:
    """Traffic of norms, activations, rotary positions and residuals in one forward pass: each operation reads and writes its tensors.

    Eager Transformers passes over a width-d tensor about 24 times a layer and over a width-f one about 6 times (RMS norm in fp32,
    rotary positions in five operations, gate and product apart); `engine.pointwise` says how much of it fused kernels leave.
    """
    d, b = shape.width, levers.dtype_bytes
    f = shape.experts_per_token * shape.expert_width or shape.mlp_width
    passes_f = 6.0 if shape.traits.gated else 3.0
    return shape.layers * tokens * b * (24.0 * d + passes_f * f) * _unfused(engine)


def spared_bytes(shape: ModelShape, levers: Levers, engine: Engine, tokens: float) -> float:
    """Of `pointwise_bytes`, those of the feed-forward part at tokens where the last layer's does not run: half of the passes over width d."""
    passes_f = 6.0 if shape.traits.gated else 3.0
    return tokens * levers.dtype_bytes * (12.0 * shape.width + passes_f * shape.mlp_width) * _unfused(engine)


def _unfused(engine: Engine) -> float:
    return 0.42 if engine.compiled else engine.pointwise


def logits_traffic(setting: Setting, shape: ModelShape, tokens: float) -> float:
    """The loss reads and writes its logits: about as many bytes as `whole` holds, twice."""
    return 2 * 14 * shape.vocab * tokens


def held_weight_bytes(shape: ModelShape, levers: Levers) -> float:
    """Bytes of weights that one pass through the layers and the head reads."""
    weights = shape.layers * shape.active_layer_parameters + shape.vocab * shape.width
    return weights * (QUANT_BYTES[levers.quantisation] if levers.quantisation else levers.dtype_bytes)


def dequantised_bytes(shape: ModelShape, levers: Levers) -> float:
    """Traffic of turning the 4-bit weights into 16-bit ones once: read the packed, write the plain ones."""
    if not levers.quantisation or not levers.quantisation.startswith("nf4"):
        return 0.0
    return shape.layers * shape.layer_matrix_parameters * (QUANT_BYTES[levers.quantisation] + 2.0)


def launched(setting: Setting, shape: ModelShape, levers: Levers, backward: bool) -> float:
    """Small operations of one pass through the model."""
    engine = setting.engine
    adapted = len(levers.lora_modules) if levers.tuning == "lora" else 0
    quantised = len(shape.matrices) if levers.quantisation and levers.quantisation.startswith("nf4") and not backward else 0
    forward = shape.layers * (engine.layer_ops + engine.lora_ops * adapted + engine.quantised_ops * quantised) + 20
    again = forward if backward and levers.checkpointing == "full" else 0.0
    return forward * (2.8 if backward else 1.0) + again  # a backward node launches one to two kernels for each forward one


def calibrated_pass(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: float, vocabulary_tokens: float, training: bool
) -> float:
    """Seconds of a forward pass, or of forward, recomputation and backward pass, at this machine's own rates; 0 without them."""
    own = setting.hardware.measured
    if own is None:
        return 0.0
    total, again = sequences * tokens, float(training and levers.checkpointing == "full")
    passes = (3.0 if levers.tuning == "full" else 2.0) + again if training else 1.0
    attention = forward_attention_flops(shape, sequences, tokens, levers.attention != "eager")
    head = forward_matmul_flops(shape, vocabulary_tokens) - forward_matmul_flops(shape, vocabulary_tokens, 0.0)
    size = total * shape.width * levers.dtype_bytes
    operations = launched(setting, shape, levers, backward=False)
    spared = spared_tokens(setting, shape, levers, total)
    layers = forward_matmul_flops(shape, total, 0.0) - spared_flops(shape, spared)
    streams = pointwise_bytes(shape, levers, setting.engine, total) - spared_bytes(shape, levers, setting.engine, spared)
    return (
        own.product_seconds(passes * layers, total, shape.width)
        + own.product_seconds(head * (passes + (training and setting.loss.recomputes) - again), vocabulary_tokens, shape.width)
        + own.attention_seconds(attention * (3.5 + again if training else 1.0), tokens, training)
        + own.stream_seconds(streams * passes, size, training)
        + own.logit_seconds(vocabulary_tokens * shape.vocab, shape.vocab, training, setting.loss.name == "fused")
        + own.launch_seconds(operations, training)
        + own.launch_seconds(operations * again, training=False)
        + (table_seconds(own, shape, levers, vocabulary_tokens > 0) if training and levers.tuning == "full" else 0.0)
    )


def table_seconds(own: Measured, shape: ModelShape, levers: Levers, vocabulary: bool) -> float:
    """Seconds of the gradients of embedding and output head, which are as large for one token as for all: each is filled with zeros,
    the head's is written by a product, a tied pair is added, and with accumulation each is added to those of earlier micro-batches.
    """
    size = 4.0 * shape.vocab * shape.width
    passes = 1 + 3 * vocabulary + 3 * (vocabulary and shape.tied)
    passes += (levers.accumulation > 1) * 3 * (2 if vocabulary and not shape.tied else 1)
    return own.addition_seconds(passes * size, size)


def micro_step(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: float, vocabulary: bool = True) -> Work:
    """Forward and backward pass over one micro-batch on one device."""
    tp = levers.tensor_parallel
    total = sequences * tokens
    loss_tokens = setting.workload.loss_tokens if vocabulary else 0.0
    spared = spared_tokens(setting, shape, levers, total)
    matmul, attention = training_flops(shape, levers, sequences, tokens, loss_tokens, spared)
    passes = 3.0 + (levers.checkpointing == "full")
    moved = (pointwise_bytes(shape, levers, setting.engine, total) - spared_bytes(shape, levers, setting.engine, spared)) * passes
    if levers.attention == "eager":
        moved += (
            shape.layers * shape.heads * sequences * tokens**2 * 30
        )  # scores, mask, fp32 softmax and its gradient, each read and written
    moved += logits_traffic(setting, shape, total * loss_tokens)
    reads = held_weight_bytes(shape, levers) * (3.0 if levers.tuning == "full" else 2.0)
    return Work(
        matmul_flops=matmul / tp,
        attention_flops=attention / tp,
        bytes_moved=moved / tp,
        weight_bytes=reads / tp,
        dequantised_bytes=dequantised_bytes(shape, levers) * (2.0 + (levers.checkpointing == "full")) / tp,
        operations=launched(setting, shape, levers, backward=True),
        communicated_bytes=gathered_bytes(setting, shape, levers)
        + (4 * shape.layers * total * shape.width * levers.dtype_bytes if tp > 1 else 0.0),
        messages=(2 + (levers.checkpointing == "full")) * shape.layers
        if levers.parallel in ("zero3", "fsdp") and setting.data_parallel > 1
        else 0.0,
        calibrated_seconds=calibrated_pass(setting, shape, levers, sequences, tokens, total * loss_tokens, training=True),
    )


def gathered_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Weights that a device receives in one micro-batch under ZeRO-3 or FSDP: the whole model forward and backward.

    Source: arXiv 1910.02054 section 7.2.
    """
    if levers.parallel not in ("zero3", "fsdp") or setting.data_parallel == 1:
        return 0.0
    per = QUANT_BYTES[levers.quantisation] if levers.quantisation else levers.dtype_bytes
    return 2 * shape.parameters * per * (1 - 1 / setting.data_parallel) / levers.tensor_parallel


def optimizer_step(setting: Setting, shape: ModelShape, levers: Levers) -> Work:
    """One optimizer step on one device: read gradient, weight and moments, write weight and moments; and the gradients' reduction."""
    trained = trained_parameters(shape, levers)
    n, tp = setting.data_parallel, levers.tensor_parallel
    divided = n if levers.parallel != "ddp" else 1
    per = 7 * levers.weight_bytes if "adam" in levers.optimizer else 3 * levers.weight_bytes
    reduced = 2 * trained * levers.dtype_bytes * (1 - 1 / n) if n > 1 else 0.0
    if levers.parallel in ("zero2", "zero3", "fsdp"):
        reduced /= 2  # a reduce-scatter; ZeRO-3 gathers the weights in the passes
    return Work(
        bytes_moved=trained * per / divided / tp,
        communicated_bytes=reduced / tp,
        operations=20.0,
        messages=float(shape.layers if n > 1 else 0),
        paged_bytes=paged_bytes(setting, shape, levers),
        calibrated_seconds=setting.hardware.measured.optimizer_seconds(trained) if setting.hardware.measured else 0.0,
    )


def paged_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes that one step moves to and from host memory: gradients and weights where the optimizer is offloaded, and of a paged state
    what does not fit beside the weights.
    """
    if levers.offload_optimizer:
        return 2 * trained_parameters(shape, levers) * levers.weight_bytes / shards(setting)["optimizer"]  # gradients down, weights up
    if not levers.optimizer.startswith("paged"):
        return 0.0
    free = setting.hardware.usable_bytes - weights(setting, shape, levers)
    return 2 * max(0.0, state_bytes(setting, shape, levers) - max(0.0, free))


def forward_pass(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: float, vocabulary_tokens: float) -> Work:
    """One forward pass without gradients: scoring, reference log-probs, values, prefill."""
    tp, total = levers.tensor_parallel, sequences * tokens
    gathered = gathered_bytes(setting, shape, levers) / 2
    spared = spared_tokens(setting, shape, levers, total)
    moved = pointwise_bytes(shape, levers, setting.engine, total) - spared_bytes(shape, levers, setting.engine, spared)
    return Work(
        matmul_flops=(forward_matmul_flops(shape, total, vocabulary_tokens) - spared_flops(shape, spared)) / tp,
        attention_flops=forward_attention_flops(shape, sequences, tokens, levers.attention != "eager") / tp,
        bytes_moved=(moved + 14 * shape.vocab * vocabulary_tokens) / tp,
        weight_bytes=held_weight_bytes(shape, levers) / tp,
        dequantised_bytes=dequantised_bytes(shape, levers) / tp,
        operations=launched(setting, shape, levers, backward=False),
        communicated_bytes=gathered + (2 * shape.layers * total * shape.width * levers.dtype_bytes if tp > 1 else 0.0),
        calibrated_seconds=calibrated_pass(setting, shape, levers, sequences, tokens, vocabulary_tokens, training=False),
    )


def decode_step(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, context: float) -> Work:
    """One token for each of `sequences`: every weight is read once, and the cache of `context` tokens of each.

    Source: arXiv 2211.05102 section 2.
    """
    tp, b = levers.tensor_parallel, DTYPE_BYTES[levers.dtype]
    cache = 2 * shape.layers * shape.kv_width * b * sequences * context
    routed = (
        shape.layers * (shape.layer_matrix_parameters - shape.active_layer_parameters) * min(1.0, sequences / max(1, shape.experts))
        if shape.experts
        else 0.0
    )
    return Work(
        matmul_flops=forward_matmul_flops(shape, sequences) / tp,
        attention_flops=shape.layers * sequences * 4 * shape.query_width * context / tp,
        bytes_moved=(cache + pointwise_bytes(shape, levers, setting.engine, sequences) + 12 * shape.vocab * sequences) / tp,
        weight_bytes=(held_weight_bytes(shape, levers) + routed * b) / tp,
        operations=launched(setting, shape, levers, backward=False),
        communicated_bytes=2 * shape.layers * sequences * shape.width * b if tp > 1 else 0.0,
        messages=2.0 * shape.layers if tp > 1 else 0.0,
        calibrated_seconds=calibrated_decode(setting, shape, levers, sequences, context),
    )


def calibrated_decode(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, context: float) -> float:
    """Seconds of one decoding step at this machine's own rates; 0 without them. A step with a cache launches more than a forward pass."""
    own = setting.hardware.measured
    if own is None:
        return 0.0
    layer_cache = 2 * shape.kv_width * levers.dtype_bytes * sequences * context
    attention = shape.layers * sequences * 4 * shape.query_width * context
    pass_seconds = calibrated_pass(setting, shape, levers, sequences, 1.0, sequences, training=False)
    launched_before = own.launch_seconds(launched(setting, shape, levers, backward=False), training=False)
    parts = (
        pass_seconds
        - launched_before
        + own.attention_seconds(attention, context, training=False)
        + own.addition_seconds(CACHE_PASSES * layer_cache * shape.layers, layer_cache / 2)
        + own.logit_seconds(sequences * shape.vocab, shape.vocab, False, False)  # cumulated and searched, as often as made
    )
    return own.decode_launch_seconds(shape.layers) + own.decode_share * parts
