"""Runs one stage: ask DVC, start the process, follow its rows, stop it on request, judge its end, have DVC record what
it made.
"""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from config.differences import Watched, in_a_line
from config.dvc_stages import defined, locked
from config.errors import ParamsError, StageStopped
from config.records import CHANGED_CODE_VARIABLE, RUN_ID_VARIABLE, USD_LEFT_VARIABLE, USD_PER_SECOND_VARIABLE
from config.workspace.rows import pipeline_rows
from costs.ledger.ledger import read_ledger
from costs.tables.price import stage_price
from tasks.dvc.lock_digests import lock_content
from tasks.dvc.origins import find_origin, record_origin
from tasks.dvc.recording import command_of, record_outputs, require_inputs
from tasks.dvc.reuse import reuse
from tasks.dvc.status import digests, is_unchanged
from tasks.run.changed_code import policy
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.stage.budget_watcher import BudgetWatch
from tasks.stage.outcome import Outcome, judge
from tasks.stage.paid import Lifetime
from tasks.stage.process import Ended, run_process
from tasks.stage.progress import Display, Progress, Watch, attempts

logger = logging.getLogger(__name__)

Observer = Callable[[Progress], None]
PLAIN_WORDS = re.compile(r"[\w./ -]+")


def run_stage(
    run: Run,
    stage: str,
    stop: StopRequest,
    observe: Observer,
    launch: Sequence[str] = (),
    before_record: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run `stage` unless its outputs are valid; `observe` is called several times a second meanwhile. `launch` are
    options of the launcher beside what dvc.yaml has; `before_record` may raise before what was made can be reused.

    Raises what `tasks.stage.outcome.judge` raises, OverBudget, and EnvironmentFault for what DVC cannot check or keep.
    """
    if stop.requested:
        raise StageStopped(
            f"Stopped before {stage}, as asked. Everything before it is kept: run again to resume there."
        )
    if is_unchanged(run.root, stage) or reuse(run.root, run.params, stage, Display().say):
        return record(run, stage, Outcome(cached=True, attempt=None))
    require_inputs(run.root, stage)
    attempt = _run(run, stage, stop, observe, launch)
    before_record()
    record_outputs(run.root, stage, run.params)
    # DVC has recorded the outputs: a forced rerun shall compute, not find them done
    (run.root / "checkpoints" / stage / "done.json").unlink(missing_ok=True)
    return record(run, stage, Outcome(cached=False, attempt=attempt))


def require_same_params(run: Run, stage: str) -> None:
    """Check the params before `stage` starts or counts as unchanged. Raises ParamsError if params.yaml differs from
    what the run began with.
    """
    keys = [key for key in defined(run.root)[stage].get("params", []) if isinstance(key, str)]
    if changed := Watched(run.root / "params.yaml", run.params, keys).differences():
        raise ParamsError(
            f"params.yaml changed since the run {run.run_id} began: {in_a_line(changed)}, which {stage} reads. "
            "Put the old value back and run again to go on, or run again to begin with the new one."
        )


def record(run: Run, stage: str, outcome: Outcome) -> Outcome:
    """Record which attempt's outputs the run uses: for a cached stage, the one that made these very bytes, and the run
    that paid for it.
    """
    current = digests(run.root, stage)
    detail: dict[str, Any] = current._asdict()
    if outcome.cached and (origin := find_origin(run.root, stage, locked(lock_content(run.root), stage))):
        is_here = any(row.run_id == origin.run_id for row in pipeline_rows(run.root))
        outcome = Outcome(cached=True, attempt=origin.attempt if is_here else None, made_by=origin.run_id)
        detail["made_by"] = {"run_id": origin.run_id, "seconds": origin.seconds, "usd": origin.usd}
    run.record("stage", stage=stage, cached=outcome.cached, attempt=outcome.attempt, state="completed", detail=detail)
    if not outcome.cached and (cost := read_ledger(run.root, run.params, run.run_id).stage(stage)):
        seconds, usd = (sum(getattr(phase, unit) for phase in cost.useful_phases) for unit in ("seconds", "usd"))
        record_origin(run.root, stage, run.run_id, outcome.attempt, seconds, usd)
    return outcome


def log_path(root: Path, stage: str) -> Path:
    """Output of the stage's processes."""
    return root / "runs" / stage / "log.txt"


def command(root: Path, stage: str) -> list[str]:
    """The command of `stage` in dvc.yaml, as `dvc repro` runs it; a shell is started only for one that may need it, as
    signals are for the stage.
    """
    text = command_of(root, stage)
    return text.split() if PLAIN_WORDS.fullmatch(text) else ["/bin/sh", "-c", text]


def _run(run: Run, stage: str, stop: StopRequest, observe: Observer, launch: Sequence[str]) -> int | None:
    """Run the process of `stage` to its end; returns the attempt that made its outputs."""
    budget = BudgetWatch(run, stage)
    budget.refuse_without_room()
    watch = Watch(run.root, run.params, stage)
    lifetime = Lifetime(run.root, stage, run.run_id)

    def look(pid: int) -> bool:
        lifetime.look(pid)
        observe(watch.look())
        return budget.look(watch)

    left_usd = budget.usd_left()
    usd_per_second = stage_price(run.params, stage).usd(1.0, run.params.where.of(stage).processes)
    ended = run_process(
        [*command(run.root, stage), *launch],
        run.root,
        log_path(run.root, stage),
        stop,
        look,
        {
            RUN_ID_VARIABLE: run.run_id,
            CHANGED_CODE_VARIABLE: policy(),
            USD_PER_SECOND_VARIABLE: str(usd_per_second),
            **({} if left_usd is None else {USD_LEFT_VARIABLE: str(left_usd)}),
        },
    )
    lifetime.end(ended.pid, ended.lived_seconds)
    watch.look()
    try:
        _require_not_stopped(stage, ended, stop, budget)
        return judge(stage, lifetime.before, attempts(run.root, stage), ended)
    except StageStopped as stopped:
        if budget.reached is not None and not stop.requested:
            raise budget.over(str(stopped)) from None
        raise


def _require_not_stopped(stage: str, ended: Ended, stop: StopRequest, budget: BudgetWatch) -> None:
    """Raise StageStopped for a process that a stop has killed: a forced one, or one that had no handler yet and
    nothing to keep.
    """
    if stop.force:
        raise StageStopped(
            f"{stage} was ended at once, without a last checkpoint: run again to resume from the one before."
        )
    if ended.code < 0 and (stop.requested or budget.reached is not None):
        raise StageStopped(f"{stage} was asked to stop before it began: run again to resume there.")
