"""Seconds: a roofline with the host's launch rate as a second floor (arXiv 2211.05102 section 2; Williams et al. 2009
for the roofline).

A step takes the longer of what the device needs (matrix products at a share of the peak, the rest at a share of the
memory bandwidth) and what the host needs to launch it, plus the communication that computation does not hide.
"""

from typing import Literal, NamedTuple

from costs.formulas.compute import Work
from costs.formulas.setting import Setting

Bound = Literal["compute", "bandwidth", "launch", "communication", "fixed"]


HOST_LINK_BYTES_PER_SECOND = 24e9
"""Host memory to device over 16 lanes of PCIe 4, as measured by common bandwidth tests: 32 GB/s less protocol."""


GRAPH_MESSAGE_SECONDS = 5e-6
"""Latency of one all-reduce of some kilobytes between devices of a node that a CUDA graph launches: the device's part,
without the host's.
"""


GLOO_MESSAGE_SECONDS = 1.7e-3
"""Time of one FSDP2 collective between processes on a CPU, its hooks in Python included: two processes of one thread,
layers of 96 wide, forward and backward 5.1 ms a layer for three collectives (25 November 2026, a Xeon with two cores).
"""


class Seconds(NamedTuple):
    """Time of a phase and its bound."""

    seconds: float
    bound: Bound


def _link(setting: Setting) -> float:
    """Bytes per second that a device takes part in a collective with.

    Across nodes the rings run over all network cards of a node at once, so each byte crosses the network once a node,
    not once a device.
    """
    hardware = setting.hardware
    if setting.gpus <= setting.devices_per_node:
        return hardware.link_bytes_per_second
    return min(hardware.link_bytes_per_second, hardware.network_bytes_per_second * setting.devices_per_node)


def matmul_rate(setting: Setting) -> float:
    efficiency = setting.efficiency
    share = efficiency.host_flops if setting.hardware.is_cpu else efficiency.matmul * setting.hardware.attainable
    if setting.hardware.generation in ("hopper", "blackwell") and not setting.engine.vendor_products:
        share *= efficiency.hopper
    return setting.hardware.peak(setting.levers.dtype) * share


def duration(work: Work, setting: Setting) -> Seconds:
    """Seconds that `work`, done in one go, takes on one device."""
    device, launch = device_seconds(work, setting), launch_seconds(work, setting)
    busy = busy_seconds(device, launch, setting)
    exposed = exposed_seconds(sent_seconds(work, setting), busy, setting)
    # unpacking weights comes on top even where the host is the limit: the product that follows waits for it
    seconds = busy + unpacking_seconds(work, setting) + exposed
    computing = work.matmul_flops / matmul_rate(setting) + attention_seconds(work, setting)
    return Seconds(seconds + paging_seconds(work, setting), _bound(computing, device, launch, exposed))


def busy_seconds(device: float, launch: float, setting: Setting) -> float:
    """Launching overlaps with what an accelerator computes; a CPU does one after the other."""
    return device + launch if setting.hardware.is_cpu else max(device, launch)


def device_seconds(work: Work, setting: Setting) -> float:
    """Device time: matrix products or reading their weights, attention, and memory traffic."""
    bandwidth = setting.hardware.bandwidth_bytes_per_second * setting.efficiency.bandwidth
    products = max(work.matmul_flops / matmul_rate(setting), work.weight_bytes / bandwidth)
    return products + attention_seconds(work, setting) + work.bytes_moved / bandwidth


def attention_seconds(work: Work, setting: Setting) -> float:
    """Scores and weighted values at the share of the peak that attention kernels reach."""
    peak = setting.hardware.peak(setting.levers.dtype)
    return work.attention_flops / (peak * setting.efficiency.attention)


def launch_seconds(work: Work, setting: Setting) -> float:
    """Host time to launch every small operation."""
    return work.operations * setting.engine.op_seconds


def unpacking_seconds(work: Work, setting: Setting) -> float:
    """Turning quantised weights into 16-bit ones at the share of the bandwidth that it reaches."""
    bandwidth = setting.hardware.bandwidth_bytes_per_second
    return work.dequantised_bytes / (bandwidth * setting.efficiency.dequantise)


def paging_seconds(work: Work, setting: Setting) -> float:
    """Moving bytes between the memory of host and device."""
    link = min(setting.hardware.link_bytes_per_second, HOST_LINK_BYTES_PER_SECOND)
    return work.paged_bytes / link


def sent_seconds(work: Work, setting: Setting) -> float:
    """Time of collectives without overlap."""
    if not work.communicated_bytes and not work.messages:
        return 0.0
    return work.communicated_bytes / (_link(setting) * setting.efficiency.network) + work.messages * _message_seconds(
        setting
    )


def _message_seconds(setting: Setting) -> float:
    """Latency of one collective."""
    return GLOO_MESSAGE_SECONDS if setting.hardware.is_cpu else setting.efficiency.message_seconds


def exposed_seconds(sent: float, hiding: float, setting: Setting) -> float:
    """Exposed time of collectives: the share that never overlaps, and whatever exceeds the computation that could hide
    it.
    """
    if not sent:
        return 0.0
    return max(sent * (1 - setting.engine.overlap), sent - hiding)


def decode_duration(work: Work, setting: Setting) -> Seconds:
    """Seconds of one decoding step: weights and cache at the bandwidth that matrix-vector kernels reach, or compute,
    or launches.
    """
    hardware, quantisation, efficiency = (setting.hardware, setting.levers.quantisation, setting.efficiency)
    share = {None: efficiency.decode, "int8": efficiency.decode_int8}.get(quantisation, efficiency.decode_4bit)
    moved = work.weight_bytes / (hardware.bandwidth_bytes_per_second * share) + work.bytes_moved / (
        hardware.bandwidth_bytes_per_second * efficiency.bandwidth
    )
    compute = work.matmul_flops / matmul_rate(setting) + work.attention_flops / (
        hardware.peak(setting.levers.dtype) * efficiency.attention
    )
    whole = setting.levers.parallel not in ("zero2", "zero3", "fsdp")
    on_device = not hardware.is_cpu
    graphed = (setting.engine.graphed_decoding and on_device and whole) or (not setting.engine.op_seconds)
    launch = 0.0 if graphed else work.operations * setting.engine.op_seconds
    layers = setting.model.layers * setting.engine.decode_layer_seconds * on_device
    latency = GRAPH_MESSAGE_SECONDS if graphed else _message_seconds(setting)
    sent = work.communicated_bytes / (_link(setting) * efficiency.network) + work.messages * latency
    device = max(moved, compute) + layers
    seconds = busy_seconds(device, launch, setting) + sent
    return Seconds(seconds, _bound(compute, device, launch, sent))


def _bound(compute: float, device: float, launch: float, exposed: float) -> Bound:
    if exposed > max(device, launch):
        return "communication"
    if launch > device:
        return "launch"
    return "compute" if compute > device / 2 else "bandwidth"


def energy_kwh(gpu_hours: float, watts: float) -> float:
    """Board power for the entire time: hours x watts / 1000; without cooling and host.

    Source: arXiv 2302.13971 section 6, without its PUE.
    """
    return gpu_hours * watts / 1000
