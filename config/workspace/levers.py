"""What `rlhf levers` and `rlhf scale` found, kept in .rlhf/levers: the report, MLflow and the
command line read it.
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
    """One variant, means over its seeds. Costs are of the method and a student; None where there
    was no training.
    """

    name: str
    state: State
    reason: str = ""
    """Why it is not done."""
    changes: dict[str, Any]
    hardware: str
    """What it was planned for."""
    planned_seconds: float | None = None
    measured_seconds: float | None = None
    planned_usd: float | None = None
    measured_usd: float | None = None
    planned_total_usd: float | None = None
    """Of all stages that make its model, as if none were there yet."""
    measured_total_usd: float | None = None
    planned_peak_bytes: float | None = None
    measured_peak_bytes: float | None = None
    planned_flops: float | None = None
    measured_flops: float | None = None
    """The planned, times the tokens that were processed over those that were planned."""
    waste_usd: float = 0.0
    """Of a variant that diverged or failed: all that it cost."""
    sweep_usd: float = 0.0
    """What choosing its learning rate cost, beside its own cost."""
    quality: float | None = None
    quality_low: float | None = None
    quality_high: float | None = None
    difference: float | None = None
    """To the quality of the baseline."""
    difference_low: float | None = None
    difference_high: float | None = None
    same_quality: bool = False
    """`difference_low` is within the margin."""
    kl: float | None = None
    usd_at_target: float | None = None
    """Cost until the quality first reached the target; None: never, or not observed."""
    updates_at_target: int | None = None
    seeds: int = 0


class FrontierPoint(Found):
    """One policy: how far from the SFT model, and how good."""

    kl: float
    quality: float


class Levers(Found):
    """A comparison."""

    study: str
    """Digest of the baseline: comparisons of the same one are the same study."""
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
    """Everything that was spent on the comparison, sweeps and waste included."""


def read_levers(root: Path) -> Levers | None:
    """The newest comparison, None if there is none that can be read."""
    try:
        return Levers.model_validate_json((root / FOLDER / LEVERS).read_bytes())
    except (OSError, ValidationError):
        return None


def keep(root: Path, found: BaseModel, name: str) -> Path:
    """Put a result in the place of the one before; returns where it is."""
    path = root / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, found.model_dump_json(indent=1) + "\n")
    return path


class GrowthPoint(Found):
    """One size of a factor. Seconds are of the stages' work, without their start and their end."""

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
    """Stage -> its exponent as measured and as planned, where the factor concerns it."""


class Scale(Found):
    """What `rlhf scale` measured."""

    hardware: str
    factors: list[Growth]
    answer: str
    """Whether cost grows with the square of the model, and when."""
    total_usd: float


def read_scale(root: Path) -> Scale | None:
    """The newest measurement of growth, None if there is none that can be read."""
    try:
        return Scale.model_validate_json((root / FOLDER / SCALE).read_bytes())
    except (OSError, ValidationError):
        return None
