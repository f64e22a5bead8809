"""A writer of the rows that a run leaves, by a clock of its own."""

from pathlib import Path
from typing import Any

from config import jsonl
from config.records import AttemptRow, MetricRow, PipelineRow, UsageRow

MIB = 2**20
FINGERPRINT = "0123456789abcdef"


class Clock:
    """Appends rows and lets their seconds pass."""

    def __init__(self, root: Path, run_id: str, now: float, processes: int = 1) -> None:
        self.root, self.run_id, self.now, self.processes = root, run_id, now, processes

    def pipeline(self, event: Any, **values: Any) -> None:
        row = PipelineRow(time=self.now, run_id=self.run_id, event=event, **values)
        jsonl.append(self.root / "runs" / "pipeline.jsonl", row)

    def attempt(self, stage: str, number: int, event: Any, step: int = 0, **values: Any) -> None:
        row = AttemptRow(
            time=self.now, run_id=self.run_id, attempt=number, event=event,
            fingerprint=FINGERPRINT, pid=4242, step=step, device="cpu",
            world_size=self.processes, **values,
        )  # fmt: skip
        jsonl.append(self.root / "runs" / stage / "attempts.jsonl", row)

    def use(
        self, stage: str, number: int, phase: str, step: int, seconds: float,
        tokens: int = 0, sequences: int = 0, mib: int = 620, usd: float = 0.0,
    ) -> UsageRow:  # fmt: skip
        self.now += seconds
        row = UsageRow(
            time=self.now, run_id=self.run_id, attempt=number, step=step, phase=phase,
            seconds=seconds, tokens=tokens, sequences=sequences, peak_bytes=mib * MIB,
            device="cpu", world_size=self.processes, usd=usd,
        )  # fmt: skip
        jsonl.append(self.root / "runs" / stage / "usage.jsonl", row)
        return row

    def log(self, stage: str, number: int, step: int, **values: float) -> None:
        row = MetricRow(time=self.now, run_id=self.run_id, attempt=number, step=step, values=values)
        jsonl.append(self.root / "runs" / stage / "metrics.jsonl", row)

    def done(self, stage: str, number: int, step: int) -> None:
        self.attempt(stage, number, "end", step, exit_code=0)
        self.pipeline("stage", stage=stage, attempt=number)
