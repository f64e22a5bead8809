"""Work of a step or pass on a device."""

from typing import NamedTuple

from costs.formulas.counts import (
    dequantised_bytes,
    experts_read,
    forward_attention_flops,
    forward_matmul_flops,
    held_weight_bytes,
    launched,
    logits_traffic,
    pointwise_bytes,
    spared_bytes,
    spared_flops,
    spread_bytes,
    training_flops,
    unpacked_bytes,
)
from costs.formulas.kept import spared_tokens
from costs.formulas.setting import DTYPE_BYTES, QUANT_BYTES, Levers, Setting
from costs.formulas.sharding import collective_bytes, sharding_of
from costs.formulas.states import gradient_width, shards, stored_bytes, trained_parameters
from costs.tables.shapes import ModelShape


class Work(NamedTuple):
    """Work of a phase on one device; sums add up."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    bytes_moved: float = 0.0
    """Bytes to and from device memory by operations other than products of large matrices."""
    weight_bytes: float = 0.0
    """Weight bytes read by matrix products; hidden behind them in large batches."""
    dequantised_bytes: float = 0.0
    """Bytes written and read to convert quantised weights to 16 bits."""
    operations: float = 0.0
    """Small operations launched by the host."""
    communicated_bytes: float = 0.0
    """Bytes sent by each device."""
    messages: float = 0.0
    paged_bytes: float = 0.0
    """Bytes between host and device memory."""

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


def micro_step(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: float, vocabulary: bool = True
) -> Work:
    """Forward and backward pass over one micro-batch on one device."""
    total = sequences * tokens
    loss_tokens = setting.workload.loss_tokens if vocabulary else 0.0
    spared = spared_tokens(setting, shape, levers, total)
    matmul, attention = training_flops(
        shape,
        levers,
        sequences,
        tokens,
        loss_tokens,
        spared,
        causal=not setting.mask_tensor,
        head_again=setting.loss.recomputes,
        places=setting.workload.attention_places,
    )
    passes = 3.0 + (levers.checkpointing == "full")
    moved = (
        pointwise_bytes(shape, levers, setting.engine, total)
        - spared_bytes(shape, levers, setting.engine, spared)
        + spread_bytes(setting, shape, levers, total)
    ) * passes
    moved += eager_bytes(shape, levers, sequences, tokens) * (passes - 2)
    moved += eager_bytes(shape, levers, sequences, tokens, EAGER_BACKWARD)
    moved += logits_traffic(shape, total * loss_tokens)
    if not setting.engine.compiled:
        moved += unpacked_bytes(shape, levers) * (2.0 + (levers.checkpointing == "full"))
    reads = held_weight_bytes(shape, levers) * (3.0 if levers.tuning == "full" else 2.0)
    sent, messages = micro_communication(setting, shape, levers)
    return Work(
        matmul_flops=matmul,
        attention_flops=attention,
        bytes_moved=moved,
        weight_bytes=reads,
        dequantised_bytes=dequantised_bytes(shape, levers) * (2.0 + (levers.checkpointing == "full")),
        operations=launched(setting, shape, levers, backward=True),
        communicated_bytes=sent,
        messages=messages,
        paged_bytes=micro_paged_bytes(setting, shape, levers),
    )


EAGER_FORWARD, EAGER_BACKWARD = 28.0, 38.0
"""Bytes moved for each score of attention that is written out in operations at 16 bits. Forward: product 2, mask 4,
cast to fp32 6, softmax 8, cast back 6, product 2. Backward: products 6, cast 6, softmax with its output and gradient
12, cast 6, mask 4, second reads of both products 4.
"""


def eager_bytes(
    shape: ModelShape, levers: Levers, sequences: float, tokens: float, bytes_per_score: float = EAGER_FORWARD
) -> float:
    """Traffic of the scores of eager attention in one pass; 0 for fused kernels."""
    if levers.attention != "eager":
        return 0.0
    return shape.layers * shape.heads * sequences * tokens**2 * bytes_per_score


def gather_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes that a device sends to gather all weights once: as stored, or in the type of computing where the software
    has one for collectives. Source: arXiv 1910.02054 section 7.
    """
    if sharding_of(setting).fsdp2:
        size = stored_bytes(setting, shape, levers)
    elif levers.quantisation:
        size = shape.parameters * QUANT_BYTES[levers.quantisation]
    else:
        size = shape.parameters * levers.dtype_bytes
    return collective_bytes(size, setting.gpus)


def reduce_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes that a device sends to reduce all gradients and scatter the sums: in their own type where torch does it,
    else in that of computing.
    """
    row = sharding_of(setting)
    width = gradient_width(setting, levers) if row.fsdp2 or row.buckets else levers.dtype_bytes
    size = trained_parameters(shape, levers) * width
    return collective_bytes(size, setting.gpus)


def micro_communication(setting: Setting, shape: ModelShape, levers: Levers) -> tuple[float, float]:
    """(bytes, messages) of sharding in one micro-batch, forward and backward."""
    row = sharding_of(setting)
    sent = row.micro_gathers * gather_bytes(setting, shape, levers)
    sent += row.micro_reduces * reduce_bytes(setting, shape, levers)
    return sent, 1.0 * (row.micro_gathers + row.micro_reduces) * (shape.layers + 1)


def step_communication(setting: Setting, shape: ModelShape, levers: Levers) -> tuple[float, float]:
    """(bytes, messages) of sharding once per optimizer step."""
    row = sharding_of(setting)
    sent = row.step_gathers * gather_bytes(setting, shape, levers)
    sent += row.step_reduces * reduce_bytes(setting, shape, levers)
    return sent, 1.0 * shape.layers if row.step_gathers or row.step_reduces else 0.0


def gather(setting: Setting, shape: ModelShape, levers: Levers) -> Work:
    """Gathering a sharded role for the passes of a phase without gradient, as in our stages."""
    if not sharding_of(setting).fsdp2:
        return Work()
    return Work(
        communicated_bytes=gather_bytes(setting, shape, levers),
        messages=1.0 * (shape.layers + 1),
        paged_bytes=offloaded_weights(setting, shape, levers),
    )


def offloaded_weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a device's shard of the weights if they wait in host memory, else 0."""
    if not levers.offload_weights:
        return 0.0
    return stored_bytes(setting, shape, levers) / shards(setting)["weights"]


def optimizer_step(setting: Setting, shape: ModelShape, levers: Levers) -> Work:
    """One optimizer step on one device: read gradient, weight and moments, write weight and moments; and the
    gradients' reduction.
    """
    trained = trained_parameters(shape, levers)
    per = 7 * levers.weight_bytes
    sent, messages = step_communication(setting, shape, levers)
    return Work(
        bytes_moved=trained * per / shards(setting)["optimizer"],
        communicated_bytes=sent,
        operations=20.0,
        messages=messages,
        paged_bytes=paged_bytes(setting, shape, levers),
    )


def paged_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes that one step moves to and from host memory where the optimizer is offloaded: gradients down, weights up;
    of FSDP2 they move with every micro-batch.
    """
    if not levers.offload_optimizer or sharding_of(setting).fsdp2:
        return 0.0
    trained = trained_parameters(shape, levers)
    return 2 * trained * levers.weight_bytes / shards(setting)["optimizer"]


def micro_paged_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes between host and device in one micro-batch of FSDP2 that offloads: a device's share of the weights up for
    each gather, that of the gradients down.
    """
    row = sharding_of(setting)
    if not row.fsdp2 or not levers.offload_optimizer:
        return 0.0
    gradients = trained_parameters(shape, levers) * gradient_width(setting, levers)
    return row.micro_gathers * offloaded_weights(setting, shape, levers) + gradients / shards(setting)["gradients"]


def forward_pass(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: float, vocabulary_tokens: float
) -> Work:
    """One forward pass without gradients: scoring, reference log-probs, values, prefill."""
    total = sequences * tokens
    row = sharding_of(setting)
    # our stages gather a role once for all passes of a phase
    gathered = gather_bytes(setting, shape, levers) if row.micro_gathers and not row.fsdp2 else 0.0
    spared = spared_tokens(setting, shape, levers, total)
    moved = (
        pointwise_bytes(shape, levers, setting.engine, total)
        - spared_bytes(shape, levers, setting.engine, spared)
        + spread_bytes(setting, shape, levers, total)
        + eager_bytes(shape, levers, sequences, tokens)
    )
    if not setting.engine.compiled:  # fused into the product there
        moved += unpacked_bytes(shape, levers)
    places = setting.workload.attention_places
    return Work(
        matmul_flops=forward_matmul_flops(shape, total, vocabulary_tokens) - spared_flops(shape, spared),
        attention_flops=forward_attention_flops(shape, sequences, tokens * places, levers.attention != "eager"),
        bytes_moved=moved + 14 * shape.vocab * vocabulary_tokens,
        weight_bytes=held_weight_bytes(shape, levers),
        dequantised_bytes=dequantised_bytes(shape, levers),
        operations=launched(setting, shape, levers, backward=False),
        communicated_bytes=gathered,
    )


def decode_step(setting: Setting, shape: ModelShape, levers: Levers, sequences: float, context: float) -> Work:
    """One token for each of `sequences`: every weight is read once, and the cache of `context` tokens of each.

    Source: arXiv 2211.05102 section 2.
    """
    b = DTYPE_BYTES[levers.dtype]
    cache = 2 * shape.layers * shape.kv_width * b * sequences * context
    if setting.engine.concatenates_cache:
        # read and written to append a token; repeated for grouped queries, then read so
        repeats = shape.heads / shape.kv_heads
        cache *= 3.0 if repeats == 1 else 3.0 + 2 * repeats
    routed = 0.0
    if shape.experts:
        # beside those of one token, which `held_weight_bytes` counts
        expert_share = shape.experts_per_token / shape.experts
        others = (experts_read(shape, sequences) - expert_share) / (1 - expert_share) if expert_share < 1 else 0.0
        unmet = shape.layers * (shape.layer_matrix_parameters - shape.active_layer_parameters)
        routed = unmet * others * (QUANT_BYTES.get(levers.quantisation or "", b))
    return Work(
        matmul_flops=forward_matmul_flops(shape, sequences),
        attention_flops=shape.layers * sequences * 4 * shape.query_width * context,
        bytes_moved=cache + pointwise_bytes(shape, levers, setting.engine, sequences) + 12 * shape.vocab * sequences,
        weight_bytes=held_weight_bytes(shape, levers) + routed,
        operations=launched(setting, shape, levers, backward=False),
    )
