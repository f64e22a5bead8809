"""Runs one stage: ask DVC, start the process, follow its rows, stop it on request, judge its
end.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from config import jsonl
from config.errors import StageStopped
from config.methods.registry import stage_module
from config.records import STAGES, PipelineRow
from reporting.row_digests import PREPARED, keep_row_digests
from tasks.dvc.repro import is_repro_process, log_path, start_repro
from tasks.dvc.same_params import require_recorded_params
from tasks.dvc.status import digests, is_unchanged
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.lifetime import Lifetime
from tasks.stage.outcome import Outcome, judge, last_attempt
from tasks.stage.progress import Progress, Watch, attempts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
ORPHAN_PATIENCE_SECONDS = 600.0

Observer = Callable[[Progress], None]


def run_stage(
    run: Run,
    stage: str,
    stop: StopRequest,
    observe: Observer,
) -> Outcome:
    """Run `stage` unless its outputs are valid; `observe` is called several times a second
    meanwhile.

    Raises what `tasks.stage.outcome.judge` raises.
    """
    if stop.made:
        raise StageStopped(
            f"Stopped before {stage}, as asked. Everything before it is kept: run again to resume "
            "there."
        )
    if is_unchanged(run.root, stage):
        outcome = Outcome(cached=True, attempt=None)
    else:
        outcome = _reproduce(run, stage, stop, observe)
    return record(run, stage, outcome)


def record(run: Run, stage: str, outcome: Outcome) -> Outcome:
    """Note which attempt's outputs the run uses: for a cached stage, the one that made these very
    bytes.
    """
    known = digests(run.root, stage)
    if outcome.cached:
        outcome = Outcome(cached=True, attempt=maker(run.root, stage, known.outs))
    if PREPARED in known.outs:
        _keep_rows(run.root, known.outs[PREPARED])
    run.record(
        "stage",
        stage=stage,
        cached=outcome.cached,
        attempt=outcome.attempt,
        state="completed",
        detail=known._asdict(),
    )
    return outcome


def _keep_rows(root: Path, version: str) -> None:
    """Remember which rows this version of the data has, for rlhf compare; that cannot fail the
    run.
    """
    try:
        keep_row_digests(root, version)
    except OSError as error:
        logger.warning("which rows the data has could not be kept for rlhf compare: %s", error)


def maker(root: Path, stage: str, outs: dict[str, str]) -> int | None:
    """The newest attempt whose outputs had these digests in an earlier pipeline run, None if none
    is recorded.
    """
    rows = jsonl.read(root / "runs" / "pipeline.jsonl", PipelineRow).rows
    made = [
        row
        for row in rows
        if row.stage == stage and row.attempt is not None and row.detail.get("outs") == outs
    ]
    return made[-1].attempt if made else None


def _reproduce(run: Run, stage: str, stop: StopRequest, observe: Observer) -> Outcome:
    before = last_attempt(attempts(run.root, stage))
    budget = BudgetWatch(run, stage)
    budget.refuse_without_room()
    watch = Watch(run.root, run.params, stage)
    path = log_path(run.root, stage)
    size_before = path.stat().st_size if path.exists() else 0
    code = _watched(run, stage, start_repro(run, stage), watch, stop, budget, observe)
    output = path.read_bytes()[size_before:].decode(errors="replace")
    if stop.force:
        raise StageStopped(
            f"{stage} was ended at once, without a last checkpoint: run again to resume from the "
            "one before."
        )
    if stop.made and code and watch.attempt is None:
        raise StageStopped(f"{stage} was asked to stop before it began: run again to resume there.")
    try:
        outcome = judge(stage, before, attempts(run.root, stage), code, output)
    except StageStopped as stopped:
        if budget.reached is not None and not stop.made:
            raise budget.over(str(stopped)) from None
        raise
    require_recorded_params(run, stage)
    # DVC has recorded the outputs: a forced rerun shall compute, not find them done
    (run.root / "checkpoints" / stage / "done.json").unlink(missing_ok=True)
    return outcome


def _watched(
    run: Run,
    stage: str,
    process: "subprocess.Popen[bytes]",
    watch: Watch,
    stop: StopRequest,
    budget: BudgetWatch,
    observe: Observer,
) -> int:
    """Exit code of `dvc repro`, once it has ended."""
    asked: set[tuple[int, int]] = set()
    lifetime = Lifetime(run, stage)
    try:
        while process.poll() is None:
            observe(watch.look())
            lifetime.look(process.pid, watch.attempt)
            if stop.made or budget.look(watch):
                _pass_on(stop, process.pid, watch.pid, asked)
            time.sleep(POLL_SECONDS)
    except BaseException:
        _let_checkpoint(process, watch)
        raise
    watch.look()
    if watch.pid is not None:
        _end_left_behind(watch.pid)
        watch.look()
    lifetime.end(watch.attempt)
    return process.returncode


def _let_checkpoint(process: "subprocess.Popen[bytes]", watch: Watch) -> None:
    """An error here must not cost the stage its work: it is stopped as usual, and killed only if it
    does not stop.
    """
    watch.look()
    asked: set[tuple[int, int]] = set()
    _pass_on(StopRequest(), process.pid, watch.pid, asked)
    try:
        process.wait(ORPHAN_PATIENCE_SECONDS)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _end_left_behind(pid: int) -> None:
    """dvc was killed before its stage: let the stage checkpoint, its outputs would not be
    recorded.
    """
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        psutil.wait_procs([process], timeout=ORPHAN_PATIENCE_SECONDS)


def _pass_on(stop: StopRequest, group: int, pid: int | None, asked: set[tuple[int, int]]) -> None:
    """Send SIGTERM to the stage process once, or to all before it exists; SIGKILL to all if the
    stop is forced.
    """
    if stop.force:
        _signal_group(group, signal.SIGKILL)
    elif pid is not None and (pid, signal.SIGTERM) not in asked:
        asked.add((pid, signal.SIGTERM))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    elif not asked:
        # no handler is installed yet, and there is nothing to checkpoint
        _signal_group(group, signal.SIGTERM)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def stop_orphans(root: Path, say: Callable[[str], None]) -> None:
    """Let stage processes that a killed pipeline left behind checkpoint and end, so that two never
    write the same outputs.
    """
    for stage in STAGES:
        rows = attempts(root, stage)
        if not rows or rows[-1].event == "end" or not _is_stage_process(rows[-1].pid, stage, root):
            continue
        pid = rows[-1].pid
        say(
            f"{stage} is still running from a run that was killed (process {pid}): letting it "
            "checkpoint, then going on from there."
        )
        with suppress(psutil.NoSuchProcess):
            parents = [
                parent
                for parent in psutil.Process(pid).parents()
                if is_repro_process(parent.cmdline())
            ]
            os.kill(pid, signal.SIGTERM)
            psutil.wait_procs([psutil.Process(pid), *parents], timeout=ORPHAN_PATIENCE_SECONDS)
    # outputs of a stage that just ended may still be being recorded: DVC is busy until then
    psutil.wait_procs(_dvc_processes(root), timeout=ORPHAN_PATIENCE_SECONDS)


def _dvc_processes(root: Path) -> list[psutil.Process]:
    """Every running `dvc repro` in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            command = process.cmdline()
            if is_repro_process(command) and Path(process.cwd()) == root.resolve():
                found.append(process)
    return found


def _is_stage_process(pid: int, stage: str, root: Path) -> bool:
    """Process ids are reused: command and folder must match too."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        modules = {stage_module(stage), "training.process.launch"}
        is_stage = f"training.{stage}" in command or (stage in command and modules & {*command})
        return bool(is_stage) and Path(process.cwd()) == root.resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
