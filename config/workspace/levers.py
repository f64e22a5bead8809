"""Results of `rlhf levers` and `rlhf scale`, kept in .rlhf/levers. The report, MLflow and the
command line read them.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from config.atomic_file import write_atomically

FOLDER = Path(".rlhf/levers")
LEVERS, SCALE = "levers.json", "scale.json"

State = Literal["done", "diverged", "failed", "not here"]


class Found(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class VariantResult(Found):
    """One variant, means over its seeds. Costs cover the method and a student; None if nothing was
    trained.
    """

    name: str
    state: State
    reason: str = ""
    """Why the state is not `done`."""
    changes: dict[str, Any]
    hardware: str
    """Device of the plan."""
    planned_seconds: float | None = None
    measured_seconds: float | None = None
    planned_usd: float | None = None
    measured_usd: float | None = None
    planned_total_usd: float | None = None
    """Cost of all stages that make its model, as if none were reused."""
    measured_total_usd: float | None = None
    planned_peak_bytes: float | None = None
    measured_peak_bytes: float | None = None
    planned_flops: float | None = None
    measured_flops: float | None = None
    """The planned FLOPs, scaled by tokens processed over tokens planned."""
    waste_usd: float = 0.0
    """Total cost of a variant that diverged or failed."""
    sweep_usd: float = 0.0
    """Cost of choosing its learning rate, beside its own cost."""
    quality: float | None = None
    quality_low: float | None = None
    quality_high: float | None = None
    difference: float | None = None
    """Quality difference to the baseline."""
    difference_low: float | None = None
    difference_high: float | None = None
    same_quality: bool = False
    """Whether `difference_low` is within the margin."""
    kl: float | None = None
    usd_at_target: float | None = None
    """Cost until the quality first reached the target; None: never, or not observed."""
    updates_at_target: int | None = None
    seeds: int = 0


class FrontierPoint(Found):
    """One policy: KL to the SFT model, and quality."""

    kl: float
    quality: float


class Levers(Found):
    """A comparison."""

    study: str
    """Digest of the baseline: comparisons with the same digest belong to the same study."""
    judge: Literal["gold", "win_rate"]
    margin: float
    target: float
    """Quality of the baseline minus the margin."""
    seeds: list[int]
    confidence: float
    method: str
    usd_per_hour: float
    variants: list[VariantResult]
    frontier: dict[str, list[FrontierPoint]]
    """Method -> its points: along training, or by n for best-of-n."""
    pareto: list[str]
    pairs: int
    pairs_ranked_right: float | None
    wrong_pairs: list[tuple[str, str]]
    chosen: str | None
    best: str | None
    regret: float | None
    total_usd: float
    """Total spent on the comparison, including sweeps and waste."""


def read_levers(root: Path) -> Levers | None:
    """The newest comparison, None if there is none that can be read."""
    try:
        return Levers.model_validate_json((root / FOLDER / LEVERS).read_bytes())
    except (OSError, ValidationError):
        return None


def keep(root: Path, found: BaseModel, name: str) -> Path:
    """Replace the previous result; returns the path."""
    path = root / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, found.model_dump_json(indent=1) + "\n")
    return path


class GrowthPoint(Found):
    """One size of a factor. Seconds are those of the stages' work, without start and end."""

    size: float
    measured_seconds: float
    planned_seconds: float
    measured_usd: float
    planned_usd: float
    stages: dict[str, dict[str, float]]
    """Stage -> `measured` and `planned` seconds, and `measured/<phase>`, `planned/<phase>`."""


class Growth(Found):
    """How cost grows with one factor, all else held still: seconds ~ size^exponent."""

    factor: str
    unit: str
    points: list[GrowthPoint]
    exponent: float
    exponent_low: float
    exponent_high: float
    planned_exponent: float
    by_stage: dict[str, tuple[float, float]]
    """Stage -> its measured and planned exponents, if the factor affects it."""


class Scale(Found):
    """Results of `rlhf scale`."""

    hardware: str
    factors: list[Growth]
    answer: str
    """Whether cost grows with the square of the model, and when."""
    total_usd: float


def read_scale(root: Path) -> Scale | None:
    """The newest growth measurement, None if there is none that can be read."""
    try:
        return Scale.model_validate_json((root / FOLDER / SCALE).read_bytes())
    except (OSError, ValidationError):
        return None
