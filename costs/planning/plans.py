"""Records of a plan, and their JSON. Other tools read the keys."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Usd:
    """US dollars at the low, expected and high price."""

    low: float
    expected: float
    high: float

    def __add__(self, other: object) -> "Usd":
        if not isinstance(other, Usd):
            return NotImplemented
        return Usd(self.low + other.low, self.expected + other.expected, self.high + other.high)


NOTHING = Usd(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Interval:
    """Interval of a planned number, and what it rests on (costs/planning/grades.py)."""

    basis: str
    low: float
    high: float
    why: str


UNKNOWN = Interval("formula", 0.0, 0.0, "nothing is planned")


@dataclass(frozen=True)
class PhasePlan:
    """One phase over the stage; flops and bytes are sums over devices."""

    phase: str
    flops: float
    bytes_moved: float
    seconds: float
    bound: str
    """The resource that bounds its time: compute, bandwidth, launch, communication, fixed."""
    usd: float
    """US dollars at the expected price."""
    peak_bytes: float = 0.0
    """Highest memory of one device in this phase."""
    paid_usd: float = 0.0
    """The part of `usd` that is paid to others."""


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage. Bytes are of one device, as its allocator counts them."""

    stage: str
    hardware: str
    gpus: int
    rented: int
    """Devices paid for, including idle ones."""
    idle_usd: float
    """The part of the expected cost for idle devices."""
    fits: bool
    shortfall_bytes: float
    """Missing memory on one device, 0 if the stage fits."""
    lever: str
    """The change that makes it fit, empty if it fits or nothing helps."""
    peak_bytes_per_gpu: float
    device_bytes_per_gpu: float
    """Includes the allocator's fragmentation and the CUDA context; must be below the device's memory."""
    peak_phase: str
    memory: Mapping[str, Mapping[str, float]]
    """role -> part -> bytes at the peak."""
    phases: tuple[PhasePlan, ...]
    seconds: float
    gpu_hours: float
    kwh: float
    usd: Usd
    steps: float
    tokens: float
    mfu: float
    levers: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    time_interval: Interval = UNKNOWN
    """Interval of `seconds`."""
    memory_interval: Interval = UNKNOWN
    """Interval of `peak_bytes_per_gpu`."""
    held: str = ""
    """What the stage runs with, as its timings name it; empty without a model."""
    units: Mapping[str, float] = field(default_factory=dict)
    """Phase -> what it does, in its unit (config/work.py)."""


def lasting(stage: StagePlan, seconds: float) -> StagePlan:
    """The plan of the same devices for other seconds."""
    factor, usd, interval = seconds / stage.seconds, stage.usd, stage.time_interval
    return replace(
        stage,
        seconds=seconds,
        gpu_hours=stage.gpu_hours * factor,
        kwh=stage.kwh * factor,
        idle_usd=stage.idle_usd * factor,
        usd=Usd(usd.low * factor, usd.expected * factor, usd.high * factor),
        mfu=stage.mfu / factor,
        time_interval=replace(interval, low=interval.low * factor, high=interval.high * factor),
    )


@dataclass(frozen=True)
class Plan:
    """All stages of a run, one after the other on the same devices."""

    stages: tuple[StagePlan, ...]
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def total(self) -> dict[str, Any]:
        usd = NOTHING
        for stage in self.stages:
            usd = usd + stage.usd
        return {
            "fits": self.fits,
            "peak_bytes_per_gpu": max((stage.peak_bytes_per_gpu for stage in self.stages), default=0.0),
            "flops": sum(phase.flops for stage in self.stages for phase in stage.phases),
            "bytes_moved": sum(phase.bytes_moved for stage in self.stages for phase in stage.phases),
            "seconds": sum(stage.seconds for stage in self.stages),
            "seconds_low": sum(stage.time_interval.low for stage in self.stages),
            "seconds_high": sum(stage.time_interval.high for stage in self.stages),
            "gpu_hours": sum(stage.gpu_hours for stage in self.stages),
            "kwh": sum(stage.kwh for stage in self.stages),
            "usd": asdict(usd),
            "idle_usd": sum(stage.idle_usd for stage in self.stages),
        }

    def as_json(self) -> dict[str, Any]:
        """The object that `rlhf plan --json` prints."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "total": self.total,
            "assumptions": list(self.assumptions),
        }
