"""Seconds of a pass or of a decoding step at the rates that `rlhf calibrate` measured on this
machine: on a CPU the parts are added.
"""

from dataclasses import replace

from config.records import LOOPS
from costs.formulas.counts import (
    forward_attention_flops,
    forward_matmul_flops,
    launched,
    plain_operations,
    pointwise_bytes,
    spared_bytes,
    spared_flops,
    spread_bytes,
)
from costs.formulas.kept import spared_tokens
from costs.formulas.setting import Levers, Setting
from costs.formulas.states import trained_parameters
from costs.tables.measured import CACHE_PASSES, Measured
from costs.tables.shapes import ModelShape

OWN_STAGES = (*LOOPS, "evaluate", "contest")
"""Stages whose rollouts and passes without gradient run in our own loops."""


def calibrated_pass(
    setting: Setting,
    shape: ModelShape,
    levers: Levers,
    sequences: float,
    tokens: float,
    vocabulary_tokens: float,
    training: bool,
) -> float:
    """Seconds of a forward pass, or of forward, recomputation and backward pass, at this machine's
    own rates; 0 without them.

    Passes of our own stages take longer than the calibrated trunks: without gradients in
    proportion, in updates by operation, as each wakes threads that sleep. TRL's trainers have an
    overhead of their own (`trainer_step_seconds`).
    """
    own = setting.hardware.measured
    if own is None:
        return 0.0
    seconds = _pass(own, setting, shape, levers, sequences, tokens, vocabulary_tokens, training)
    if not training:
        return seconds * (own.scoring_pace if setting.stage in OWN_STAGES else 1.0)
    if setting.stage in LOOPS:
        seconds += (own.update_launch_pace - 1) * launches_seconds(
            own, setting, shape, levers, True
        )
    return seconds


def launches_seconds(
    own: Measured, setting: Setting, shape: ModelShape, levers: Levers, training: bool
) -> float:
    """Seconds of launching the operations of a pass, including those that checkpointing repeats."""
    operations = launched(setting, shape, levers, backward=False)
    again = float(training and levers.checkpointing == "full")
    return own.launch_seconds(operations, training) + own.launch_seconds(
        operations * again, training=False
    )


def _pass(
    own: Measured,
    setting: Setting,
    shape: ModelShape,
    levers: Levers,
    sequences: float,
    tokens: float,
    vocabulary_tokens: float,
    training: bool,
) -> float:
    """The sum of its parts at the machine's best rates; in bf16 that of fp32 times the measured
    effect of autocast, if there is one.
    """
    if levers.dtype == "bf16" and own.forward_autocast:
        plain = replace(levers, dtype="fp32")
        seconds = _pass(own, setting, shape, plain, sequences, tokens, vocabulary_tokens, training)
        return seconds * own.autocast_ratio(4.0 * sequences * tokens * shape.width, training)
    total, again = sequences * tokens, float(training and levers.checkpointing == "full")
    passes = (3.0 if levers.tuning == "full" else 2.0) + again if training else 1.0
    causal = levers.attention != "eager" and not (training and setting.mask_tensor)
    seen = tokens * setting.workload.attention_places
    attention = forward_attention_flops(shape, sequences, seen, causal)
    head = forward_matmul_flops(shape, vocabulary_tokens) - forward_matmul_flops(
        shape, vocabulary_tokens, 0.0
    )
    size = total * shape.width * levers.dtype_bytes
    spared = spared_tokens(setting, shape, levers, total)
    layers = forward_matmul_flops(shape, total, 0.0) - spared_flops(shape, spared)
    streams = (
        pointwise_bytes(shape, levers, setting.engine, total)
        - spared_bytes(shape, levers, setting.engine, spared)
        + spread_bytes(setting, shape, levers, total)
    )
    return (
        own.product_seconds(passes * layers, total, shape.width, levers.dtype)
        + own.product_seconds(
            head * (passes + (training and setting.loss.recomputes) - again),
            vocabulary_tokens,
            shape.width,
            levers.dtype,
        )
        + own.attention_seconds(attention * (3.5 + again if training else 1.0), seen, training)
        + own.stream_seconds(streams * passes, size, training)
        + own.logit_seconds(
            vocabulary_tokens * shape.vocab, shape.vocab, training, setting.loss.name == "fused"
        )
        + launches_seconds(own, setting, shape, levers, training)
        + (
            table_seconds(own, shape, levers, vocabulary_tokens > 0)
            if training and levers.tuning == "full"
            else 0.0
        )
        + fold_seconds(own, setting, shape, levers) * (2 + again if training else 1)
        + (adapter_gradient_seconds(own, shape, levers, total) if training else 0.0)
    )


def fold_seconds(own: Measured, setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Seconds to fold the adapters into their matrices for one pass
    (training/modeling/lora_linear.py): each is read and written once.

    None where PEFT computes the product: over quantised weights, with dropout, and GPT-2's
    matrices, which are transposed.
    """
    if (
        levers.tuning != "lora"
        or levers.quantisation
        or levers.lora_dropout
        or setting.engine.name != "ours"
        or shape.family == "gpt2"
    ):
        return 0.0
    folded = shape.adapted(levers.lora_modules, shape.traits.packed_qkv).values()
    return shape.layers * sum(
        own.addition_seconds(8.0 * i * o, 4.0 * i * o)
        + own.product_seconds(2.0 * levers.lora_rank * i * o, i, o, levers.dtype)
        for i, o, _ in folded
    )


def adapter_gradient_seconds(
    own: Measured, shape: ModelShape, levers: Levers, tokens: float
) -> float:
    """Seconds of the thin products that give the gradients of A and B: through the other half, then
    with inputs or gradients of outputs.
    """
    if levers.tuning != "lora":
        return 0.0
    return own.product_seconds(
        4.0 * trained_parameters(shape, levers) * tokens,
        levers.lora_rank,
        shape.width,
        levers.dtype,
    )


def table_seconds(own: Measured, shape: ModelShape, levers: Levers, vocabulary: bool) -> float:
    """Seconds of the gradients of embedding and output head, which are as large for one token as
    for all: each is filled with zeros, the head's is written by a product, a tied pair is added,
    and with accumulation each is added to those of earlier micro-batches.
    """
    size = 4.0 * shape.vocab * shape.width
    passes = 1 + 3 * vocabulary + 3 * (vocabulary and shape.tied)
    passes += (levers.accumulation > 1) * 3 * (2 if vocabulary and not shape.tied else 1)
    return own.addition_seconds(passes * size, size)


def calibrated_decode(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, context: float
) -> float:
    """Seconds of one decoding step at this machine's own rates; 0 without them. A step with a cache
    launches more than a forward pass.
    """
    own = setting.hardware.measured
    if own is None:
        return 0.0
    layer_cache = 2 * shape.kv_width * levers.dtype_bytes * sequences * context
    attention = shape.layers * sequences * 4 * shape.query_width * context
    pass_seconds = _pass(own, setting, shape, levers, sequences, 1.0, 0.0, training=False)
    operations = launched(setting, shape, levers, backward=False)
    folded = fold_seconds(own, setting, shape, levers)
    parts = (
        pass_seconds
        - own.launch_seconds(operations, training=False)
        - folded
        + own.attention_seconds(attention, context, training=False)
        + own.addition_seconds(CACHE_PASSES * layer_cache * shape.layers, layer_cache / 2)
    )
    beside = (
        own.launch_seconds(operations - plain_operations(setting, shape), training=False) + folded
    )
    pace = own.rollout_pace if setting.stage in OWN_STAGES else 1.0
    head = own.sampling_seconds(sequences, shape.vocab, shape.width)
    return pace * (
        own.decode_launch_seconds(shape.layers) + beside + head + own.decode_share * parts
    )
