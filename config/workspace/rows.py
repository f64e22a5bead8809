"""The rows of the runs of a workspace, in runs/pipeline.jsonl."""

from pathlib import Path

from config import jsonl
from config.records import STAGES, AttemptRow, PipelineRow, UsageRow

PIPELINE = Path("runs") / "pipeline.jsonl"
ENDED = ("end", "left")
"""Events of a run that is not running any more."""


def pipeline_rows(root: Path) -> list[PipelineRow]:
    """Start, stages and end of every run, oldest first."""
    return jsonl.read(root / PIPELINE, PipelineRow).rows


def add_pipeline_row(root: Path, row: PipelineRow) -> None:
    jsonl.append(root / PIPELINE, row)


def last_sign_of_life(root: Path, run_id: str) -> float:
    """When a run, or a stage process of it, wrote its last row; seconds since the epoch."""
    times = [row.time for row in pipeline_rows(root) if row.run_id == run_id]
    for stage in STAGES:
        path = root / "runs" / stage / "attempts.jsonl"
        rows: list[AttemptRow] = jsonl.read(path, AttemptRow).rows
        usage = jsonl.read(path.with_name("usage.jsonl"), UsageRow).rows
        times += [row.time for row in [*rows, *usage] if row.run_id == run_id]
    return max(times)
