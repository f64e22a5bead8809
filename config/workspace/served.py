"""What `rlhf serve` served, and what its server cost: append-only, outside of runs/.

.rlhf/served.jsonl   ServedRow   one row for each model and RECORD_SECONDS, and one as it stops
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from config import jsonl
from config.workspace.benchmarked import Usage

SERVED = Path(".rlhf/served.jsonl")
RECORD_SECONDS = 600.0


class ServedRow(BaseModel):
    """One model's share of the server's time since the previous row."""

    model_config = ConfigDict(frozen=True)

    time: float
    """End of the interval, seconds since the epoch."""
    run_id: str
    usd_per_hour: float
    usage: Usage


class Served(BaseModel):
    """Total usage of one model."""

    model_config = ConfigDict(frozen=True)

    tokens: float
    """Input and output tokens."""
    usd: float
    """The server's price for the whole time, idle or not."""


NOTHING_SERVED = Served(tokens=0.0, usd=0.0)


def served_of(root: Path, run_id: str) -> Served:
    """Usage of a run's model so far; an incomplete row is skipped."""
    rows = [row for row in jsonl.read(root / SERVED, ServedRow).rows if row.run_id == run_id]
    return Served(
        tokens=sum(row.usage.input_tokens + row.usage.output_tokens for row in rows),
        usd=sum(row.usd_per_hour * row.usage.wall_seconds / 3600 for row in rows),
    )
