"""Tensor parallelism of published runs, which our stages do not have: each device is planned as one that holds its
part of the model, and all-reduces are added.

Two all-reduces a layer in each direction. Source: arXiv 1909.08053 section 3.
"""

from dataclasses import replace

from benchmarks.published.engines import Software
from costs.formulas.setting import Setting
from costs.formulas.time import GRAPH_MESSAGE_SECONDS
from costs.tables.catalogue import Hardware
from costs.tables.rates import Efficiency
from costs.tables.shapes import ModelShape


def part_of(shape: ModelShape, ways: int) -> ModelShape:
    """What one of `ways` devices holds: its heads, its part of the feed-forward width and of the vocabulary; norms and
    the residual stream are whole.
    """
    return replace(
        shape,
        heads=max(1, shape.heads // ways),
        kv_heads=max(1, shape.kv_heads // ways),
        mlp_width=-(-shape.mlp_width // ways),
        expert_width=-(-shape.expert_width // ways),
        shared_expert_width=-(-shape.shared_expert_width // ways),
        vocab=-(-shape.vocab // ways),
    )


def reducing(software: Software, shape: ModelShape, sequences: float, on: Hardware, rates: Efficiency) -> Software:
    """The software with the all-reduces of each layer of a decoding step, in what it launches for the layer, or in the
    time of its graph.
    """
    sent = 2 * sequences * shape.width * 2.0 / (on.link_bytes_per_second * rates.network)
    if software.op_seconds:
        more = (2 * rates.message_seconds + sent) / software.layer_ops
        return replace(software, op_seconds=software.op_seconds + more)
    layer = software.decode_layer_seconds + 2 * GRAPH_MESSAGE_SECONDS + sent
    return replace(software, decode_layer_seconds=layer)


def training_seconds(setting: Setting) -> float:
    """Seconds that the all-reduces of a micro-batch take beyond what computation hides."""
    levers, work = setting.levers, setting.workload
    tokens = levers.micro_batch * work.mean_tokens
    sent = 4 * setting.model.layers * tokens * setting.model.width * levers.dtype_bytes
    link = setting.hardware.link_bytes_per_second * setting.efficiency.network
    return sent / link * (1 - setting.engine.overlap)
