"""Shares of the peak rates that programs reach. Few, the same for all models and devices, and free to be measured on a
machine.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Attained shares of the peak rates, the same for every device and model; their held-out error is in
    docs/published-costs.md.

    matmul: a model's matrix products, as a share of the best that the device reaches. attention: flash kernels reach
    less on the exploited half of the causal square. bandwidth: streaming kernels. decode: matrix-vector products by
    storage type, whose unpacking costs cycles.
    """

    matmul: float = 0.76
    hopper: float = 0.78
    """Share of `matmul` that PyTorch's matrix products reach on Hopper and later, which are fast enough that tails of
    kernels show.
    """
    attention: float = 0.41
    bandwidth: float = 0.72
    decode: float = 0.80
    decode_int8: float = 0.70
    decode_4bit: float = 0.61
    dequantise: float = 0.25
    """bitsandbytes and torchao unpack NF4 far below the bandwidth."""
    network: float = 0.68
    message_seconds: float = 12e-6
    """Latency of one collective."""
    host_flops: float = 0.6
    """Share of the peak on a CPU."""


EFFICIENCY = Efficiency()
