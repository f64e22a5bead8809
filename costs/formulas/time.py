"""Seconds: a roofline with the host's launch rate as a second floor (arXiv 2211.05102 section 2;
Williams et al. 2009 for the roofline).

A step takes the longer of what the device needs (matrix products at a share of the peak, the rest
at a share of the memory bandwidth) and what the host needs to launch it, plus the communication
that computation does not hide.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from costs.formulas.compute import Work
from costs.formulas.setting import Setting

Bound = Literal["compute", "bandwidth", "launch", "communication", "fixed"]


HOST_LINK_BYTES_PER_SECOND = 24e9
"""Host memory to device over 16 lanes of PCIe 4, as measured by common bandwidth tests: 32 GB/s
less protocol.
"""


GRAPH_MESSAGE_SECONDS = 5e-6
"""Latency of one all-reduce of some kilobytes between devices of a node that a CUDA graph launches:
the device's part, without the host's.
"""


class Seconds(NamedTuple):
    """Time of a phase and what sets it."""

    seconds: float
    bound: Bound


def _link(setting: Setting) -> float:
    """Bytes per second that a device takes part in a collective with.

    Across nodes the rings run over all network cards of a node at once, so each byte crosses the
    network once a node, not once a device.
    """
    hardware = setting.hardware
    if setting.gpus <= setting.devices_per_node:
        return hardware.link_bytes_per_second
    return min(
        hardware.link_bytes_per_second, hardware.network_bytes_per_second * setting.devices_per_node
    )


def _matmul_rate(setting: Setting) -> float:
    efficiency = setting.efficiency
    share = (
        efficiency.host_flops
        if setting.hardware.is_cpu
        else efficiency.matmul * setting.hardware.attainable
    )
    return setting.hardware.peak(setting.levers.dtype) * share


def duration(work: Work, setting: Setting) -> Seconds:
    """Seconds that `work`, done in one go, takes on one device."""
    if work.calibrated_seconds:
        return _calibrated(work, setting)
    hardware, efficiency = setting.hardware, setting.efficiency
    bandwidth = hardware.bandwidth_bytes_per_second * efficiency.bandwidth
    matmul = work.matmul_flops / _matmul_rate(setting)
    attention = work.attention_flops / (hardware.peak(setting.levers.dtype) * efficiency.attention)
    products = max(matmul, work.weight_bytes / bandwidth)
    device = products + attention + work.bytes_moved / bandwidth
    # unpacking weights comes on top even where the host is the limit: the product that follows
    # waits for it
    unpacking = work.dequantised_bytes / (
        hardware.bandwidth_bytes_per_second * efficiency.dequantise
    )
    launch = work.operations * setting.engine.op_seconds
    paging = work.paged_bytes / min(hardware.link_bytes_per_second, HOST_LINK_BYTES_PER_SECOND)
    sent = (
        work.communicated_bytes / (_link(setting) * efficiency.network)
        + work.messages * efficiency.message_seconds
    )
    exposed = max(sent * (1 - setting.engine.overlap), sent - max(device, launch))
    seconds = max(device, launch) + unpacking + exposed + paging
    return Seconds(seconds, _bound(matmul + attention, device, launch, exposed))


def _calibrated(work: Work, setting: Setting) -> Seconds:
    """The measured machine's own time, and what it is mostly spent on by the roofline."""
    plain = replace(setting, hardware=replace(setting.hardware, measured=None))
    return Seconds(
        work.calibrated_seconds, duration(work._replace(calibrated_seconds=0.0), plain).bound
    )


def decode_duration(work: Work, setting: Setting) -> Seconds:
    """Seconds of one decoding step: weights and cache at the bandwidth that matrix-vector kernels
    reach, or compute, or launches.
    """
    if work.calibrated_seconds:
        return _calibrated(work, setting)
    hardware, quantisation, efficiency = (
        setting.hardware,
        setting.levers.quantisation,
        setting.efficiency,
    )
    share = {None: efficiency.decode, "fp8": efficiency.decode, "int8": efficiency.decode_int8}.get(
        quantisation, efficiency.decode_4bit
    )
    moved = work.weight_bytes / (hardware.bandwidth_bytes_per_second * share) + work.bytes_moved / (
        hardware.bandwidth_bytes_per_second * efficiency.bandwidth
    )
    compute = work.matmul_flops / _matmul_rate(setting) + work.attention_flops / (
        hardware.peak(setting.levers.dtype) * efficiency.attention
    )
    launch = work.operations * setting.engine.op_seconds
    layers = setting.model.layers * setting.engine.decode_layer_seconds
    latency = efficiency.message_seconds if setting.engine.op_seconds else GRAPH_MESSAGE_SECONDS
    sent = work.communicated_bytes / (_link(setting) * efficiency.network) + work.messages * latency
    device = max(moved, compute) + layers
    seconds = max(device, launch) + sent
    return Seconds(seconds, _bound(compute, device, launch, sent))


def _bound(compute: float, device: float, launch: float, exposed: float) -> Bound:
    if exposed > max(device, launch):
        return "communication"
    if launch > device:
        return "launch"
    return "compute" if compute > device / 2 else "bandwidth"


def energy_kwh(gpu_hours: float, watts: float) -> float:
    """Board power for the whole time: hours x watts / 1000; without cooling and host.

    Source: arXiv 2302.13971 section 6, without its PUE.
    """
    return gpu_hours * watts / 1000
