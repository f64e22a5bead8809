"""Measures this machine's memory and best rates for the planner.

python -m training.calibrate.machine FILE.json
"""

import json
import logging
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

from config.workspace.machine import bf16_instructions
from training.process.command import run_command
from training.process.device import device, device_name

SECONDS = 0.3
"""Duration of each measurement."""
WIDTH = {True: 1024, False: 8192}
"""Width of the matrices, on a CPU and on an accelerator."""
STREAM_BYTES = 2**28
"""Size of one tensor, larger than the caches."""


def measure() -> dict[str, object]:
    """The fields of config/workspace/machine.py's Machine that do not depend on the project."""
    on, dtypes = device(), ["fp32", "bf16", "fp16"]
    on_cpu = on.type == "cpu"
    if on_cpu:
        dtypes = ["fp32", "bf16"] if bf16_instructions() else ["fp32"]
    name, memory, usable = device_memory(on)
    return {
        "name": name,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "usable_bytes": usable,
        "torch": torch.__version__,
        "flops_per_second": {dtype: product_rate(dtype, on, WIDTH[on_cpu]) for dtype in dtypes},
        "bytes_per_second": addition_rate(on),
    }


def product_rate(dtype: str, on: torch.device, width: int) -> float:
    """FLOP/s of a product of square matrices."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    matrix = torch.randn(width, width, device=on).to(kind)
    return 2 * width**3 / best_seconds(partial(torch.matmul, matrix, matrix))


def addition_rate(on: torch.device) -> float:
    """Bytes per second of an addition in place: two reads and a write of each number."""
    a, b = torch.ones(STREAM_BYTES // 4, device=on), torch.ones(STREAM_BYTES // 4, device=on)
    return 3 * STREAM_BYTES / best_seconds(partial(a.add_, b))


def best_seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest call within SECONDS, after one that warms up: other work on the machine only ever makes
    it slower.
    """
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def device_memory(on: torch.device) -> tuple[str, int, int]:
    """(name, bytes, bytes available to programs) of the device of stages; for a CPU within its control group."""
    if on.type != "cpu":
        free, total = torch.accelerator.get_memory_info()
        return device_name(on), total, free
    limits = [psutil.virtual_memory().total]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return "cpu", min(limits), min(limits)


def processor_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def main() -> None:
    Path(sys.argv[1]).write_text(json.dumps(measure()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main, "calibrate", logging.WARNING))
