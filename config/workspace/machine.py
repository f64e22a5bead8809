"""A machine as `rlhf calibrate` measured it: written by tasks/calibration/stages.py, planned with by
costs/planning/machine.py.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

MACHINE_FILE = Path(".rlhf/hardware.yaml")
"""Path in the project; the planner uses it if no device is named."""
SERVING_FILE = Path(".rlhf/serving.yaml")
"""Serving rates of this machine, written with it."""


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


class TimedStage(Part):
    """A stage that ran on this machine for some steps, beside its plan by the rates of costs/tables."""

    stage: str
    parameters: float
    """Parameters of the model that the stage ran with; 1 for the data stage."""
    start_seconds: float
    """Start of the process: imports and set-up, without reading texts and weights."""
    paces: dict[str, float]
    """Phase -> measured seconds over planned ones."""
    bytes: dict[str, float]
    """Phase -> measured peak memory beyond the planned one; empty for a stage without a model."""


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
    stages: tuple[TimedStage, ...]
    seconds: float
    """Duration of the measurement."""


class ServedPoint(Part):
    """One load on a server of a model with random weights: a constant number of concurrent requests."""

    weights: str
    """f32, q8_0 or q4_0."""
    parameters: int
    """Parameters of the matrices that a token passes through, output head included."""
    layers: int
    concurrency: int
    input_tokens: float
    """Mean per request."""
    output_tokens: float
    seconds_per_reply: float
    """Seconds per reply of the server, which answers several at once: 1 / (replies per second)."""
    ttft_seconds: float
    """Median."""


class ServingRates(Part):
    """Speed of front and llama.cpp on this machine, at its pace at that time."""

    pace_seconds: float
    """Mean seconds of a fixed piece of work (serving/bench/pace.py) between the loads; each load's times are scaled to
    it.
    """
    processor: str
    date: str
    small: tuple[ServedPoint, ...]
    """A negligible model: the cost of every request and token whatever the model. The same concurrencies for each
    length of replies.
    """
    deep: tuple[ServedPoint, ...]
    """A model with many layers and few parameters, at the same concurrencies."""
    large: tuple[ServedPoint, ...]
    """A model whose weights exceed the caches. By weights: the same concurrencies, and one load with long prompts and
    a concurrency of 1.
    """
    process_bytes: int
    """Resident memory of both processes beyond weights and cache."""
    seconds: float
    """Duration of the measurement."""
