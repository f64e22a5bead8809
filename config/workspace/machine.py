"""A machine as `rlhf calibrate` measured it: written by tasks/calibration/stages.py, planned with by
costs/planning/machine.py.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

MACHINE_FILE = Path(".rlhf/hardware.yaml")
"""Path in the project; the planner uses its rates if no device is named."""


BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Flags of /proc/cpuinfo, the faster first; without either, bf16 matrix products are emulated."""


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's fastest bf16 instructions, None without any."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((flag for flag in BF16_INSTRUCTIONS if flag in flags), None)


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(Part):
    """One machine as measured on `date`, with one process of `threads` threads."""

    name: str
    """`cpu`, or the accelerator's name."""
    processor: str
    threads: int
    memory_bytes: int
    usable_bytes: int
    torch: str
    date: str
    flops_per_second: dict[str, float]
    """dtype -> rate of a large matrix product."""
    bytes_per_second: float
    """Measured by adding tensors larger than the caches."""
    seconds: float
    """Duration of the measurement."""
