"""What a printed number is: quantity, scale, and what it is counted per."""

import pytest

from costs.published.units import GIB, unit_of
from costs.published.words import Refused


@pytest.mark.parametrize(
    ("printed", "quantity", "scale", "item"),
    [
        ("GiB peak per GPU", "memory", GIB, "step"),
        ("GB peak", "memory", 1e9, "step"),
        ("max_gpu_ram_GB", "memory", 1e9, "step"),
        ("bytes peak_memory_usage", "memory", 1.0, "step"),
        ("s per step", "time", 1.0, "step"),
        ("ms per token", "time", 1e-3, "token"),
        ("ms first-token latency", "time", 1e-3, "first token"),
        ("GPU-hours", "time", 3600.0, "job"),
        ("output tokens/s", "throughput", 1.0, "token"),
        ("samples/min", "throughput", 1 / 60, "sample"),
        ("tflops_per_gpu", "throughput", 1e12, "flop"),
        ("GB (OOM on 40GB)", "fits", 1.0, "step"),
    ],
)
def test_units(printed: str, quantity: str, scale: float, item: str) -> None:
    found = unit_of(printed)
    assert (found.quantity, found.item) == (quantity, item)
    assert found.scale == pytest.approx(scale)


def test_a_time_for_many_items() -> None:
    assert unit_of("s for 1024 samples").items == 1024
    assert unit_of("minutes_per_1000_iterations").items == 1000


def test_per_device_and_over_all() -> None:
    assert unit_of("tokens/s per GPU").per_device
    assert unit_of("tok/s/GPU").per_device
    assert not unit_of("tokens/s (all devices)").per_device
    assert unit_of("GiB (SUM over 2 GPUs, per-GPU 60.42+72.31)").over_devices


@pytest.mark.parametrize("printed", ["furlongs", "GB per widget", "GPUs needed", "", "s per moon"])
def test_a_unit_that_is_not_understood_is_refused(printed: str) -> None:
    with pytest.raises(Refused):
        unit_of(printed)
