"""The Prefect side of a run: the context every task works in, a task per stage, and the report
task.
"""

import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed

from config import jsonl
from config.differences import in_a_line
from config.errors import EnvironmentFault, OverBudget, RlhfError, StageStopped, UserError
from config.records import METHODS, PipelineRow, stages_of
from config.sections.where import LOCAL
from costs.ledger.budget import results_key
from costs.ledger.history import remember
from costs.ledger.ledger import ledger
from costs.ledger.reconcile import read_plan, reconcile
from reporting.build import build_report, build_summary
from reporting.numbers import duration, usd
from tasks.deployment.alive import shown_alive
from tasks.dvc.status import default_remote, public, push
from tasks.pipeline.run_progress import RunProgress
from tasks.planning.plan import ELSEWHERE, Prepared, keep, spent_by_runs
from tasks.remote.client import (
    check_placement,
    fetch_aligned,
    place_of,
    remote_stages,
    run_here,
    run_remote,
)
from tasks.run.month import PURPOSE
from tasks.run.run import (
    Run,
    begin,
    end_left_open,
    keep_copies,
    locked,
    new_run_id,
    put_params_back,
)
from tasks.run.stop import StopRequest, on_signals
from tasks.run.workspace import Unfinished, is_own, keep_lock, keep_unfinished
from tasks.servers.lost_server import hang_up, is_gone
from tasks.servers.processes import servers
from tasks.stage.lifetime import note_killed
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.progress import Display, Progress, line
from tasks.stage.runner import stop_orphans
from tasks.ui.events import RunEvent, run_event
from tasks.ui.links import pages
from tasks.ui.progress_artifact import ProgressArtifacts
from tasks.ui.summary import markdown, verdict_and_ledger
from tracking.shipper import Shipper

logger = logging.getLogger(__name__)

RETRIES = 2
"""Times a crashed stage is started again; it goes on from its checkpoint."""
STOPPED, OVER_BUDGET = "Stopped", "OverBudget"
"""States of a run, and of the stage at work, that was asked to stop or has reached its budget:
resumable.
"""
SHIPPING_PERSISTENCE_SECONDS = 1800.0
"""How long an MLflow that is away at the end of a run is tried again, where the run's workspace is
looked at by nobody later.
"""
ARTIFACT_PATIENCE_SECONDS = 5.0
"""For the last progress to be shown."""


class Pipeline:
    """A pipeline run at work."""

    def __init__(
        self,
        run: Run,
        stop: StopRequest,
        shipper: Shipper,
        run_progress: RunProgress,
        ahead: Sequence[str],
    ) -> None:
        self.run, self.stop, self.shipper, self.run_progress = run, stop, shipper, run_progress
        self.ahead = ahead
        """Stages that will have to be done."""
        self.display, self.progress_artifacts = Display(), ProgressArtifacts()
        self.report: Path | None = None
        self.state: State[Any] = Completed()
        """What the flow ends in, unless it fails."""


@contextmanager
def pipeline_run(prepared: Prepared) -> Iterator[Pipeline]:
    """Hold the workspace (the current folder) for one run, ship its rows meanwhile, and see to it
    that the run has an end.

    A stop is not a failure: the block ends there, and `Pipeline.state` says so. A run of a
    deployment waits for another one that is at work here; any other raises EnvironmentFault.
    """
    root, params = Path.cwd(), prepared.params
    served = [flow_run.id, flow_run.parent_flow_run_id] if deployment.id else []
    with (
        on_signals() as stop,
        shown_alive(served),
        locked(root, _patience(stop) if deployment.id else None),
    ):
        end_left_open(root)
        stop_orphans(root, Display().say)
        note_killed(root)
        before = (root / "params.yaml").read_bytes() if (root / "params.yaml").exists() else None
        run = begin(root, new_run_id(flow_run.name), params, _detail(root, prepared))
        keep(run.folder, prepared)
        shipper = Shipper(
            root, params, run.run_id, SHIPPING_PERSISTENCE_SECONDS if is_own(root) else 0.0
        )
        shipper.start()
        ahead = tuple(prepared.ahead) if prepared.plan else stages_of(params.align.method)
        pipeline = Pipeline(
            run, stop, shipper, RunProgress(prepared, stages_of(params.align.method)), ahead
        )
        pipeline.progress_artifacts.start()
        try:
            yield pipeline
        except StageStopped as stopped:
            over = isinstance(stopped, OverBudget)
            pipeline.state = Cancelled(name=OVER_BUDGET if over else STOPPED, message=str(stopped))
            _end(pipeline, "over_budget" if over else "stopped", str(stopped))
        except BaseException as error:
            _end(pipeline, "failed", f"{type(error).__name__}: {error}")
            _put_params_back(pipeline, before)
            raise
        else:
            _bring_model(pipeline)
            pipeline.progress_artifacts.show("run", 1.0, "completed")
            _send(pipeline)
            _announce(pipeline, "finished", "")


def _put_params_back(pipeline: Pipeline, before: bytes | None) -> None:
    """It must not hide why the run failed."""
    try:
        undone = put_params_back(pipeline.run, before)
    except (OSError, RlhfError) as error:
        logger.warning("whether params.yaml has to be put back is not known: %s", error)
        return
    if undone:
        pipeline.display.say(
            "params.yaml is what it was before this run, which did not get past its data: without "
            f"{in_a_line(undone)}"
        )


def _patience(stop: StopRequest) -> Callable[[str], bool]:
    """A run that a server started waits for one from the command line, unless it is asked to
    stop.
    """
    notified: set[str] = set()

    def wait(holder: str) -> bool:
        if holder not in notified:
            notified.add(holder)
            logger.warning(
                "process %s is running the pipeline in this checkout: waiting for its end", holder
            )
        return not stop.made

    return wait


def _end(pipeline: Pipeline, state: RunEvent, message: str) -> None:
    """Close a run that did not come to its end, with a report of how far it came: the one in place
    is of an earlier run.
    """
    run = pipeline.run
    run.record("end", state=state, detail={"message": message})
    _remember(run)
    try:
        pipeline.report = build_report(run.root, run.params, run.run_id)
        build_summary(run.root, run.params, run.run_id)
    except UserError as error:  # it must not hide why the run ended
        pipeline.display.say(f"warning: {error}")
    keep_copies(run, pipeline.report)
    _send(pipeline)
    _announce(pipeline, state, message)


def _announce(pipeline: Pipeline, state: RunEvent, message: str) -> None:
    """Plan and result as an artifact with links to the pages of the run, and an event; whatever
    Prefect says to that, the run has ended.
    """
    run = pipeline.run
    if deployment.id is None and is_gone():
        hang_up()
        return
    pipeline.progress_artifacts.close(ARTIFACT_PATIENCE_SECONDS)
    try:
        judged, ledger = verdict_and_ledger(run)
        run_event(
            state, run.run_id, message or judged, usd=ledger.total_usd, seconds=ledger.total_seconds
        )
        links = pages(run.root, run.params, servers(run.root), run.run_id)
        content = markdown(
            run, pipeline.report, {name: url for name, url in links.items() if name != "prefect"}
        )
        create_markdown_artifact(
            content,
            key="result",
            description="What the run was planned to cost, what it cost, and what it bought",
        )
    except Exception as error:  # noqa: BLE001 -- Prefect's server may be gone, and its client raises what it likes
        logger.warning("the result could not be shown in the Prefect UI: %s", error)


def _bring_model(pipeline: Pipeline) -> None:
    """A model that was aligned elsewhere comes here to be registered; that can not fail the run."""
    try:
        fetch_aligned(pipeline.run)
    except EnvironmentFault as fault:
        logger.warning("%s", fault)
        pipeline.display.say(f"warning: {fault}")


def _remember(run: Run) -> None:
    """Keep what was planned beside what was measured, for the planner's error; that can not fail
    the run.
    """
    try:
        book = ledger(run.root, run.params, run.run_id)
        remember(run.root, book, reconcile(read_plan(run.folder), book))
    except (OSError, RlhfError) as error:
        logger.warning("plan and measurement could not be kept for later plans: %s", error)


def _send(pipeline: Pipeline) -> None:
    """Outputs to the DVC remote, the last rows and the model to MLflow meanwhile; neither can fail
    the run, and a (further) request to stop ends the waiting.
    """
    asked = pipeline.stop.requests

    def give_up() -> bool:
        return pipeline.stop.requests > asked

    pipeline.shipper.end()
    for fault in (
        push(pipeline.run.root),
        _leave_for_next(pipeline.run),
        pipeline.shipper.finish(give_up),
    ):
        if fault:
            logger.warning("%s", fault)
            pipeline.display.say(f"warning: {fault}")


def _leave_for_next(run: Run) -> str | None:
    """dvc.lock, and what is spent on results that are not complete, where each run has a workspace
    of its own.

    Returns in one line why it could not.
    """
    remote = default_remote(run.root)
    if remote is None or not is_own(run.root):
        return None
    rows: list[PipelineRow] = jsonl.read(run.root / "runs" / "pipeline.jsonl", PipelineRow).rows
    completed = any(
        (row.run_id, row.event, row.state) == (run.run_id, "end", "completed") for row in rows
    )
    try:
        keep_lock(run.root, remote)
        spent = (
            None
            if completed
            else Unfinished(run.run_id, spent_by_runs(run.root, run.params, rows, run.run_id))
        )
        keep_unfinished(remote, results_key(run.params), spent)
    except EnvironmentFault as fault:
        return str(fault)
    return None


def _detail(root: Path, prepared: Prepared) -> dict[str, Any]:
    """Where the run comes from, for the tracker, and which run it goes on from."""
    found: dict[str, Any] = {
        "continues": prepared.continues,
        "dvc.remote": public(default_remote(root)),
        "git.commit": _git(root, "rev-parse", "HEAD"),
        "prefect.flow_run_id": flow_run.id,
        ELSEWHERE: dict(prepared.spent_elsewhere),
        PURPOSE: flow_run.parent_flow_run_id if PURPOSE in (flow_run.tags or []) else None,
    }
    if found["git.commit"]:
        found["git.dirty"] = str(bool(_git(root, "status", "--porcelain", "--untracked-files=no")))
    return {key: value for key, value in found.items() if value}


def _git(root: Path, *arguments: str) -> str:
    """What git says; in an image, which has none, the commit that it was built from."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return os.environ.get("RLHF_COMMIT", "") if arguments[0] == "rev-parse" else ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _worth_another_try(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Only a crash, and only if it does not fail in the same place with the same words again."""
    error = state.data
    worth = isinstance(error, StageCrashed) and not error.hopeless
    if worth and task_run.run_count <= RETRIES:
        message = f"{error} Trying again from its checkpoint ({task_run.run_count} of {RETRIES})."
        logger.warning("%s", message)
        Display().say(message)
    return worth


def stage_task(stage: str) -> Callable[[Pipeline], None]:
    """The Prefect task that brings one stage up to date; calling it raises StageStopped if the
    stage was stopped.
    """

    @task(
        name=stage,
        retries=RETRIES,
        retry_delay_seconds=1,
        retry_condition_fn=_worth_another_try,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def bring_up_to_date(pipeline: Pipeline) -> State[Any]:
        observer = _Observer(pipeline)
        done = False
        try:
            outcome = _bring_up_to_date(pipeline, stage, observer)
            done = True
        except StageStopped as stopped:
            return Cancelled(
                name=OVER_BUDGET if isinstance(stopped, OverBudget) else STOPPED,
                message=str(stopped),
            )
        finally:
            pipeline.run_progress.close(observer.progress, stage, done)
        pipeline.display.say(observer.last_line(stage, outcome))
        return Completed(
            name="Cached" if outcome.cached else "Completed", message=_message(stage, outcome)
        )

    def call(pipeline: Pipeline) -> None:
        state = bring_up_to_date(pipeline)
        if isinstance(state, State) and state.name in (STOPPED, OVER_BUDGET):
            raise (OverBudget if state.name == OVER_BUDGET else StageStopped)(state.message or "")

    return call


def _bring_up_to_date(pipeline: Pipeline, stage: str, observer: "_Observer") -> Outcome:
    """Here, or in a container of the work pool that `where` names."""
    place = place_of(pipeline.run, stage)
    if place == LOCAL:
        return run_here(pipeline.run, stage, pipeline.stop, observer)
    return run_remote(pipeline.run, stage, place, pipeline.stop, observer)


def _message(stage: str, outcome: Outcome) -> str:
    made_by = (
        f"attempt {outcome.attempt}"
        if outcome.attempt is not None
        else "an attempt that is not recorded here"
    )
    return (
        f"{stage} is unchanged: outputs of {made_by} reused"
        if outcome.cached
        else f"{stage} done by {made_by}"
    )


class _Observer:
    """Shows a stage's progress on the terminal, and that of the stage and of the whole run as
    artifacts in the Prefect UI.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.progress: Progress | None = None
        """The newest; None if no process was started."""

    def __call__(self, progress: Progress) -> None:
        self.progress = progress
        self._pipeline.display.show(progress)
        run_progress, artifacts = self._pipeline.run_progress, self._pipeline.progress_artifacts
        state = run_progress.look(progress)
        artifacts.show("run", state.fraction, run_progress.words(state, progress.stage))
        if progress.fraction is not None:
            artifacts.show(progress.stage, progress.fraction, line(progress))

    def last_line(self, stage: str, outcome: Outcome) -> str:
        if outcome.cached or self.progress is None:
            return f"{stage:<9} unchanged"
        done = f"{stage:<9} done in {duration(self.progress.seconds)} for {usd(self.progress.usd)}"
        if self.progress.fraction is not None:
            self._pipeline.progress_artifacts.show(stage, 1.0, done)
        return done


def places(pipeline: Pipeline) -> None:
    """See that the work pools that stages are placed on can do them, before anything is paid for.
    Raises EnvironmentFault.
    """
    if any(stage in pipeline.ahead for stage in remote_stages(pipeline.run)):
        task(name="places", cache_policy=NO_CACHE, persist_result=False)(check_placement)(
            pipeline.run, pipeline.ahead
        )


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(pipeline: Pipeline) -> None:
    """Close the run and write its HTML report."""
    run = pipeline.run
    run.record("end", state="completed")
    _remember(run)
    pipeline.report = build_report(run.root, run.params, run.run_id)
    build_summary(run.root, run.params, run.run_id)
    keep_copies(run, pipeline.report)


data, sft, reward, evaluate = (stage_task(stage) for stage in ("data", "sft", "reward", "evaluate"))
_METHODS = {method: stage_task(method) for method in METHODS}


def align(pipeline: Pipeline) -> None:
    """Bring the stage that `align.method` names up to date; the models of the other methods stay as
    they are.
    """
    _METHODS[pipeline.run.params.align.method](pipeline)
