"""Stages as real processes that are killed, stopped and started again."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from config import jsonl
from config.methods.registry import stage_module
from config.records import AttemptRow, MetricRow
from tests.conftest import ROOT
from tests.support.stage_server import FORKING, HOOK

PATIENCE_SECONDS = 120.0


def started(module: str, arguments: Sequence[str], root: Path, **more: str) -> Popen[str]:
    """`python -m MODULE ARGUMENTS` in a folder; what it says on stderr is in a pipe."""
    return Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=root,
        env={**os.environ, **FORKING, "PYTHONPATH": f"{HOOK}:{ROOT}", **more},
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        text=True,
    )


def start(
    root: Path, stage: str, processes: int | None = None, module: str = "training.process.launch", **more: str
) -> Popen[str]:
    """The stage as a process of its own, or through training.process.launch as several; `more` is put into the
    environment.
    """
    if processes:
        return started(module, [stage, "--processes", str(processes)], root, **more)
    return started(stage_module(stage), [stage], root, **more)


def attempts(root: Path, stage: str) -> list[AttemptRow]:
    return jsonl.read(root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


def metric_rows(root: Path, stage: str) -> list[MetricRow]:
    return jsonl.read(root / "runs" / stage / "metrics.jsonl", MetricRow).rows


def signalled(
    root: Path,
    stage: str,
    at_step: int,
    number: signal.Signals,
    processes: int | None = None,
    pick: Callable[[int], int] = int,
) -> int:
    """Start the stage, send it a signal once it has done `at_step` steps, and return what it exits with.

    `pick` names the process that gets the signal, from the id of the one that was started.
    """
    before = max((row.attempt for row in attempts(root, stage)), default=0)
    process = start(root, stage, processes)
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not any(row.step >= at_step for row in metric_rows(root, stage) if row.attempt > before):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(pick(process.pid), number)
        process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
    return process.returncode


def finish(root: Path, stage: str, processes: int | None = None) -> None:
    """Run the stage to its end."""
    process = start(root, stage, processes)
    try:
        said = process.communicate(timeout=PATIENCE_SECONDS)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said


def metrics(root: Path, stage: str) -> dict:
    return dict(json.loads((root / "metrics" / f"{stage}.json").read_text()))


def killed_stopped_and_resumed(root: Path, stage: str, kill_at: int, stop_at: int) -> None:
    """kill -9 after a step, go on, SIGTERM after a later one, go on to the end; each attempt resumes where it
    should.
    """
    assert signalled(root, stage, kill_at, signal.SIGKILL) == -signal.SIGKILL
    assert signalled(root, stage, stop_at, signal.SIGTERM) == 75
    stopped = attempts(root, stage)[-1]
    assert (stopped.event, stopped.exit_code) == ("end", 75)
    finish(root, stage)
    resumed = [row.step for row in attempts(root, stage) if row.event == "resume"]
    assert len(resumed) == 2
    assert 0 < resumed[0] <= kill_at + 2
    assert resumed[1] == stopped.step >= stop_at
