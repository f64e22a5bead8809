"""Effect of quantising a run's model: measured by its export, kept with the run."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from config.atomic_file import write_atomically
from config.records import kept_folder

FILE = "quantised.json"


class Difference(BaseModel):
    """Mean score of the replies minus that of the trained model's to the same prompts, and its paired interval."""

    model_config = ConfigDict(frozen=True)

    mean: float
    low: float
    high: float


class QuantisedFile(BaseModel):
    """A GGUF file compared with the trained model."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """f32, q8_0 or q4_0."""
    bytes: int
    prompts: int
    flips: int
    """Prompts whose greedy reply differs from the trained model's."""
    difference: Difference
    judge: str
    """Judge of the score."""


class Quantised(BaseModel):
    """The GGUF files of one model."""

    model_config = ConfigDict(frozen=True)

    model_digest: str
    """DVC's digest of the aligned model."""
    files: tuple[QuantisedFile, ...]


def keep_quantised(root: Path, run_id: str, quantised: Quantised) -> None:
    """Keep the comparison with the run that made the model."""
    write_atomically(kept_folder(root, run_id) / FILE, quantised.model_dump_json(indent=1))


def read_quantised(root: Path, run_id: str) -> Quantised | None:
    """The comparison of the run's export; None without one, or if the file is damaged."""
    try:
        return Quantised.model_validate_json((kept_folder(root, run_id) / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
