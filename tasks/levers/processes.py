"""Stage processes and helpers of a comparison, each in its folder, with progress and a stop that
leaves a checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.alive import created
from config.atomic_file import write_atomically
from config.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EnvironmentFault,
    StageStopped,
)
from config.methods.registry import stage_module
from config.records import (
    CHANGED_CODE_VARIABLE,
    PIPELINE_VARIABLE,
    RESTART,
    ROLLOUTS_VARIABLE,
    UsageRow,
)
from config.schema import Params
from config.sections.where import SHARED_STAGES
from costs.ledger.ledger import StageCost, ledger
from costs.tables.price import stage_price
from tasks.dvc.status import environment
from tasks.run.code_version import HOME
from tasks.run.stop import StopRequest
from tasks.stage.progress import Progress, Watch, attempts

STATE = "state.json"
POLL_SECONDS = 0.2
LOG = "log.txt"


class Ended(NamedTuple):
    """How a stage ended: done, diverged or failed."""

    state: str
    reason: str = ""


def ended(folder: Path) -> Ended | None:
    """How the stage of a folder ended, None if it has not."""
    try:
        return Ended(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def run_stage(
    folder: Path, params: Params, stage: str, stop: StopRequest, show: Callable[[Progress], None]
) -> Ended:
    """Run a stage in its folder, to its end; one that is done, or diverged, is not run again.

    Raises StageStopped where it was asked to stop: it resumes from its checkpoint next time.
    """
    known = ended(folder)
    if known is not None and known.state != "failed":
        return known
    module = "training.process.launch" if stage in SHARED_STAGES else stage_module(stage)
    watch = Watch(folder, params, stage)
    code = _run(folder, [module, stage], stop, lambda: show(watch.look()))
    if code == EXIT_RESUMABLE or stop.made:
        raise StageStopped(f"{stage} was asked to stop: the same command resumes there.")
    if code == EXIT_DONE:
        found = Ended("done")
    else:
        messages = [row.message for row in attempts(folder, stage) if row.event == "end"]
        reason = messages[-1] if messages and messages[-1] else last_line(folder / LOG)
        found = Ended("diverged" if code == EXIT_DIVERGED else "failed", reason)
    write_atomically(folder / STATE, json.dumps(found._asdict()))
    return found


def run_helper(folder: Path, module: str, arguments: Sequence[str], stop: StopRequest) -> None:
    """Run a module that is not a stage. Raises StageStopped, or EnvironmentFault with its last
    line.
    """
    code = _run(folder, [module, *arguments], stop, lambda: None)
    if stop.made:
        raise StageStopped("asked to stop: the same command resumes there.")
    if code:
        raise EnvironmentFault(
            f"{module} ended with exit code {code}: {last_line(folder / LOG)} The full output is "
            f"in {folder / LOG}."
        )


def _run(folder: Path, command: Sequence[str], stop: StopRequest, look: Callable[[], None]) -> int:
    own = {
        "PYTHONPATH": str(HOME),
        # a stage stops without our help
        PIPELINE_VARIABLE: f"{os.getpid()}:{created(os.getpid())}",
        CHANGED_CODE_VARIABLE: RESTART,
        ROLLOUTS_VARIABLE: "1",
    }
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment(**own),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it only through us
        )
    asked = 0
    try:
        while process.poll() is None:
            look()
            if stop.requests > asked:
                asked = stop.requests
                _signal(process, signal.SIGKILL if stop.force else signal.SIGTERM)
            time.sleep(POLL_SECONDS)
    except BaseException:
        _signal(process, signal.SIGKILL)
        process.wait()
        raise
    look()
    return process.returncode


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing."


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


def _by_step(folder: Path, params: Params, stage: str, cost: StageCost) -> dict[int, float]:
    price, total = stage_price(params, stage), 0.0
    found: dict[int, float] = {}
    rows: list[UsageRow] = jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows
    for row in rows:
        if row.attempt == cost.attempt:
            total += price.usd(row.seconds, row.world_size)
            found[row.step] = total
    return found
