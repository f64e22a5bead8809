"""A calibrated machine's own rates, interpolated between measured sizes.

On a CPU nothing overlaps: a step is the sum of its matrix products, attention, streams through
memory, work on logits, and launches.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from config.workspace.machine import Machine

Points = tuple[tuple[float, float], ...]
"""(size, value) by rising size."""

FUSED_PASSES = 1.8
"""Passes over the logits of TRL's fused head written in torch, relative to ours: 12 and 13 against
7 and 7, counted in both codes.
"""
FUSED_TILE = 4096 * 32768
"""Logits of its largest tile."""
FUSED_BYTES = (96.0, 200.0)
"""Bytes a logit that those passes read and write, forward and with the backward pass: large tiles
are mapped anew for each.
"""
EMULATION = 83.0
"""How much longer 16-bit products take than those in fp32 on a processor without instructions for
them: the rates of `cpu` in hardware.yaml.
"""
CACHE_PASSES = 1.0
"""A decoding step reads the cache once, in attention, and appends to it in place
(training/rollout/kv_cache.py).
"""


@dataclass(frozen=True)
class Measured:
    """Rates and fixed times of one machine. `training` is forward and backward together."""

    machine: Machine
    forward_op_seconds: float
    """Of one small operation, launches and Python included."""
    training_op_seconds: float
    """The same, its backward included."""
    forward_stream_share: Points
    """Bytes of a tensor [tokens, width] -> time that a trunk's streams take, over what additions of
    that size would take.
    """
    training_stream_share: Points
    forward_logit_seconds: Points
    """Vocabulary -> seconds a logit beside its matrix product."""
    training_logit_seconds: Points
    trainer_step_seconds: float
    """What a Trainer adds to each optimizer step."""
    decode_share: float = 1.0
    """Time of a decoding step's layers beside their launches, over what their parts add up to."""
    scoring_pace: float = 1.0
    """Seconds that passes without gradient take in a stage, over what the rates say, which are the
    machine's best.
    """
    update_launch_pace: float = 1.0
    """Seconds that launching an operation takes in updates, over what the smallest trunk says: a
    stage's threads sleep between operations, and most of what its updates take beyond the trunks
    grows with their operations, not with their tokens.
    """
    rollout_pace: float = 1.0
    forward_autocast: Points = ()
    """Bytes of a tensor [tokens, width] in fp32 -> time of a trunk under bf16 autocast over its
    time in fp32; empty where that was not measured.
    """
    training_autocast: Points = ()

    @property
    def name(self) -> str:
        return self.machine.name

    def product_seconds(
        self, flops: float, rows: float, width: float, dtype: str = "fp32"
    ) -> float:
        """Of matrix products with `rows` rows and matrices about `width` wide. A 16-bit type that
        was not measured is one that the processor emulates.
        """
        measured = {p.dtype for p in self.machine.products}
        found = [
            (p.width, p.rows, p.flops_per_second)
            for p in self.machine.products
            if p.dtype == (dtype if dtype in measured else "fp32")
        ]
        slower = EMULATION if dtype in ("bf16", "fp16") and dtype not in measured else 1.0
        return slower * flops / interpolated_twice(found, width, rows)

    def autocast_ratio(self, tensor_bytes: float, training: bool) -> float:
        """Time of a trunk under bf16 autocast over its time in fp32: weights and activations are
        converted for every product, which small ones do not repay.
        """
        return interpolated(
            self.training_autocast if training else self.forward_autocast, tensor_bytes
        )

    def attention_seconds(self, flops: float, tokens: float, training: bool) -> float:
        """Of scores and weighted values over sequences of `tokens`."""
        points = tuple(
            (
                1.0 * each.tokens,
                each.training_flops_per_second if training else each.forward_flops_per_second,
            )
            for each in sorted(self.machine.attention, key=lambda each: each.tokens)
        )
        return flops / interpolated(points, tokens)

    def addition_seconds(self, moved: float, tensor_bytes: float) -> float:
        """Of additions that move `moved` bytes between tensors of `tensor_bytes` each."""
        points = tuple(
            (1.0 * s.bytes, s.bytes_per_second)
            for s in sorted(self.machine.streams, key=lambda s: s.bytes)
        )
        return moved / interpolated(points, tensor_bytes)

    def stream_seconds(self, moved: float, tensor_bytes: float, training: bool) -> float:
        """Of what a trunk does beside products and attention."""
        share = interpolated(
            self.training_stream_share if training else self.forward_stream_share, tensor_bytes
        )
        return self.addition_seconds(moved, tensor_bytes) * share

    def logit_seconds(self, logits: float, vocab: float, training: bool, fused: bool) -> float:
        """Of log-probabilities, their matrix products not counted; `fused` as TRL's head computes
        them.
        """
        each = interpolated(
            self.training_logit_seconds if training else self.forward_logit_seconds, vocab
        )
        if not fused:
            return logits * each
        tile = min(logits, FUSED_TILE) * 4
        return logits * each * FUSED_PASSES + self.addition_seconds(
            FUSED_BYTES[training] * logits, tile
        )

    def sampling_seconds(self, rows: float, vocab: float, width: float) -> float:
        """Of a token for each of `rows` sequences: their logits, and drawing from them."""
        products = [
            (s.vocab, s.rows, s.product_seconds / (s.rows * s.vocab * s.width))
            for s in self.machine.sampling
        ]
        draws = [
            (s.vocab, s.rows, s.draw_seconds / (s.rows * s.vocab)) for s in self.machine.sampling
        ]
        return (
            rows
            * vocab
            * (
                width * interpolated_twice(products, vocab, rows)
                + interpolated_twice(draws, vocab, rows)
            )
        )

    def optimizer_seconds(self, parameters: float) -> float:
        """Of a fused AdamW step, and of clipping: the gradients read twice and written once, in
        place.
        """
        points = tuple(
            (1.0 * s.parameters, s.parameters / s.seconds)
            for s in sorted(self.machine.optimizer, key=lambda s: s.parameters)
        )
        adam = parameters / interpolated(points, parameters)
        return adam * (1 + 3 / 7)  # AdamW moves seven numbers a parameter

    def decode_launch_seconds(self, layers: int) -> float:
        """Of one decoding step, by layers: measured with two."""
        return self.machine.decode_step_seconds * (1 + layers) / 3

    def launch_seconds(self, operations: float, training: bool) -> float:
        """Of `operations` forward operations; with `training` their backward passes too."""
        return operations * (self.training_op_seconds if training else self.forward_op_seconds)


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value at `size`, linear in the logarithms of both; beyond the ends that of the end."""
    sizes = [x for x, _ in points]
    place = bisect_left(sizes, size)
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    weight = log(size / x0) / log(x1 / x0)
    return exp((1 - weight) * log(y0) + weight * log(y1))


def interpolated_twice(
    points: Sequence[tuple[float, float, float]], first: float, second: float
) -> float:
    """The value at two sizes, from points (first size, second size, value): at the second for each
    first one, then at the first.
    """
    firsts = sorted({x for x, _, _ in points})
    return interpolated(
        [
            (x, interpolated(sorted((y, value) for at, y, value in points if at == x), second))
            for x in firsts
        ],
        first,
    )
