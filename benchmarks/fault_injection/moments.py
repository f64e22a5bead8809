"""When a fault strikes: a point within a stage that is repeatable in kind, though not to the microsecond."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.fault_injection.project import Project, Timeline
from benchmarks.fault_injection.witness import Witness
from config import jsonl
from config.records import AttemptRow, UsageRow

LOOK_SECONDS = 0.02
AFTER_END_SECONDS = 3.0
"""In which DVC records the outputs and the next stage starts, or the run ends."""


class Moment(NamedTuple):
    stage: str
    point: str
    """start: after seconds of the process's life; row: after so many rows on costs; end: seconds after the stage said
    that it was done.
    """
    amount: float

    def __str__(self) -> str:
        match self.point:
            case "start":
                return f"{self.stage}, {self.amount:.1f} s after its start"
            case "row":
                return f"{self.stage}, after row {self.amount:.0f}"
            case _:
                return f"{self.stage}, {self.amount:.1f} s after its end"


def draw(rng: random.Random, stage: str, timeline: Timeline) -> Moment:
    """A third each while it loads and works, the rest as it ends."""
    point = rng.choices(("start", "row", "end"), (0.3, 0.5, 0.2))[0]
    match point:
        case "start":
            return Moment(stage, point, rng.uniform(0, timeline.start_seconds))
        case "row":
            return Moment(stage, point, rng.randint(1, timeline.rows))
        case _:
            return Moment(stage, point, rng.uniform(0, AFTER_END_SECONDS))


def reached(moment: Moment, project: Project, witness: Witness, is_over: Callable[[], bool]) -> bool:
    """Wait for it; False if the run was over before."""
    folder, undisturbed = (root / "runs" / moment.stage for root in (project.root, project.undisturbed / "project"))

    def rows() -> int:
        return len(jsonl.read(folder / "usage.jsonl", UsageRow).rows) - len(
            jsonl.read(undisturbed / "usage.jsonl", UsageRow).rows
        )

    def ends() -> int:
        return sum(
            (row.event == "end") * sign
            for root, sign in ((folder, 1), (undisturbed, -1))
            for row in jsonl.read(root / "attempts.jsonl", AttemptRow).rows
        )

    conditions: dict[str, Callable[[], bool]] = {
        "start": lambda: bool(witness.of_stage(moment.stage)),
        "row": lambda: rows() >= moment.amount,
        "end": lambda: ends() > 0,
    }
    while not conditions[moment.point]():
        if is_over():
            return False
        time.sleep(LOOK_SECONDS)
    if moment.point != "row":
        time.sleep(moment.amount)
    return not is_over()
