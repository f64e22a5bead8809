"""Stage processes and helpers of a comparison, each in its folder, with progress and a stop that
leaves a checkpoint.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.atomic_file import write_atomically
from config.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_RESUMABLE,
    StageStopped,
)
from config.methods.registry import stage_module
from config.records import (
    CHANGED_CODE_VARIABLE,
    RESTART,
    ROLLOUTS_VARIABLE,
    UsageRow,
)
from config.schema import Params
from config.sections.where import SHARED_STAGES
from costs.ledger.ledger import StageCost, ledger
from costs.tables.price import stage_price
from tasks.run.code_version import HOME
from tasks.run.stop import StopRequest
from tasks.stage.process import Ended, last_line, require_done, run_process
from tasks.stage.progress import Progress, Watch, attempts

STATE = "state.json"
LOG = "log.txt"


class Made(NamedTuple):
    """How a stage ended: done, diverged or failed."""

    state: str
    reason: str = ""


def ended(folder: Path) -> Made | None:
    """How the stage of a folder ended, None if it has not."""
    try:
        return Made(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def run_stage(
    folder: Path, params: Params, stage: str, stop: StopRequest, show: Callable[[Progress], None]
) -> Made:
    """Run a stage in its folder, to its end; one that is done, or diverged, is not run again.

    Raises StageStopped where it was asked to stop: it resumes from its checkpoint next time.
    """
    known = ended(folder)
    if known is not None and known.state != "failed":
        return known
    watch = Watch(folder, params, stage)
    done = _run(folder, module_arguments(stage), stop, lambda: show(watch.look()))
    if done.code == EXIT_RESUMABLE or stop.made:
        raise StageStopped(f"{stage} was asked to stop: the same command resumes there.")
    if done.code == EXIT_DONE:
        found = Made("done")
    else:
        messages = [row.message for row in attempts(folder, stage) if row.event == "end"]
        reason = messages[-1] if messages and messages[-1] else last_line(done.output)
        found = Made("diverged" if done.code == EXIT_DIVERGED else "failed", reason)
    write_atomically(folder / STATE, json.dumps(found._asdict()))
    return found


def module_arguments(stage: str) -> list[str]:
    """What `python -m` runs for a stage."""
    return ["training.process.launch" if stage in SHARED_STAGES else stage_module(stage), stage]


def run_helper(folder: Path, module: str, arguments: Sequence[str], stop: StopRequest) -> None:
    """Run a module that is not a stage. Raises StageStopped, and what `require_done` raises."""
    done = _run(folder, [module, *arguments], stop, lambda: None)
    if stop.made:
        raise StageStopped("asked to stop: the same command resumes there.")
    require_done(module, done, folder / LOG)


def _run(
    folder: Path, arguments: Sequence[str], stop: StopRequest, show: Callable[[], None]
) -> Ended:
    def look(pid: int) -> bool:
        show()
        return False

    variables = {
        "PYTHONPATH": str(HOME),
        CHANGED_CODE_VARIABLE: RESTART,
        ROLLOUTS_VARIABLE: "1",
    }
    command = [sys.executable, "-m", *arguments]
    ended = run_process(command, folder, folder / LOG, stop, look, variables)
    show()
    return ended


class Spent(NamedTuple):
    """Measured resources of a stage."""

    seconds: float
    usd: float
    peak_bytes: int
    tokens: int
    waste_usd: float
    usd_by_step: dict[int, float]
    """Step -> US dollars up to its end, loading included."""


def spent(folder: Path, params: Params, stage: str) -> Spent:
    """From the rows that the stage left: the work that made its outputs, or where it made none, all
    of it.
    """
    if not (folder / "runs" / stage / "attempts.jsonl").exists():
        return Spent(0.0, 0.0, 0, 0, 0.0, {})  # it ended before it started
    cost = ledger(folder, params).stage(stage)
    assert cost is not None, f"{stage} has an attempt"
    phases = cost.made or cost.phases
    tokens = next((each.tokens for each in phases if each.phase in ("rollout", "train")), 0)
    return Spent(
        seconds=sum(phase.seconds for phase in phases),
        usd=sum(phase.usd for phase in phases),
        peak_bytes=max((phase.peak_bytes for phase in phases), default=0),
        tokens=tokens,
        waste_usd=cost.waste_usd if cost.made else cost.usd,
        usd_by_step=_by_step(folder, params, stage, cost),
    )


def usage(folder: Path, stage: str) -> list[UsageRow]:
    """What the stage of a folder used, step by step."""
    return list(jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows)


def _by_step(folder: Path, params: Params, stage: str, cost: StageCost) -> dict[int, float]:
    price, total = stage_price(params, stage), 0.0
    found: dict[int, float] = {}
    for row in usage(folder, stage):
        if row.attempt == cost.attempt:
            total += price.usd(row.seconds, row.world_size)
            found[row.step] = total
    return found
