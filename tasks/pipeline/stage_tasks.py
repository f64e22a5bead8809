"""The tasks of a run: one per stage, and the report."""

import logging
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Cancelled, Completed

from config.errors import OverBudget, StageStopped
from config.methods.registry import METHODS
from config.sections.where import LOCAL
from reporting.numbers import duration, usd
from tasks.cluster.driver import run_placed
from tasks.cluster.placement import check_pools, placed_stages, run_here
from tasks.dvc.light_stages import do_light_stages, record_no_student
from tasks.pipeline.pipeline_run import Pipeline, write_report
from tasks.run.run import keep_copies
from tasks.run.stop import OVER_BUDGET, STOPPED
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.progress import Display, Progress, line

logger = logging.getLogger(__name__)

RETRIES = 2
"""Retries of a crashed stage; it resumes from its checkpoint."""


def _should_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Retry only crashes, and not one that repeats at the same place with the same message."""
    error = state.data
    worth = isinstance(error, StageCrashed) and not error.hopeless
    if worth and task_run.run_count <= RETRIES:
        message = f"{error} Trying again from its checkpoint ({task_run.run_count} of {RETRIES})."
        logger.warning("%s", message)
        Display().say(message)
    return worth


def stage_task(stage: str) -> Callable[[Pipeline], None]:
    """The Prefect task of one stage; calling it raises StageStopped if the stage was stopped."""

    @task(
        name=stage,
        retries=RETRIES,
        retry_delay_seconds=1,
        retry_condition_fn=_should_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def run_stage_task(pipeline: Pipeline) -> State[Any]:
        observer = _Observer(pipeline)
        done = False
        try:
            outcome = _run_stage(pipeline, stage, observer)
            done = True
        except StageStopped as stopped:
            return _cancelled(stopped)
        finally:
            pipeline.run_progress.close(observer.progress, stage, done)
        pipeline.display.say(observer.last_line(stage, outcome))
        return Completed(name="Cached" if outcome.cached else "Completed", message=_message(stage, outcome))

    def call(pipeline: Pipeline) -> None:
        _raise_if_stopped(run_stage_task(pipeline))

    return call


def _cancelled(stopped: StageStopped) -> State[Any]:
    """The state of a task that was stopped: an exception would count as a failure."""
    return Cancelled(name=OVER_BUDGET if isinstance(stopped, OverBudget) else STOPPED, message=str(stopped))


def _raise_if_stopped(state: Any) -> None:
    if isinstance(state, State) and state.name in (STOPPED, OVER_BUDGET):
        raise (OverBudget if state.name == OVER_BUDGET else StageStopped)(state.message or "")


def _run_stage(pipeline: Pipeline, stage: str, observer: "_Observer") -> Outcome:
    """Here, or on nodes of the pool that `where` names."""
    bring_up = run_here if pipeline.run.params.where.of(stage).pool == LOCAL else run_placed
    return bring_up(pipeline.run, stage, pipeline.stop, observer)


def _message(stage: str, outcome: Outcome) -> str:
    if outcome.cached:
        return f"{stage} is unchanged: outputs of {outcome.made_by or 'a run without a record'} reused"
    return f"{stage} done by attempt {outcome.attempt}"


class _Observer:
    """Shows a stage's progress on the terminal, and that of the stage and of the run as artifacts in the Prefect
    UI.
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
            made_by = f", made by run {outcome.made_by}" if outcome.made_by else ""
            return f"{stage:<9} unchanged{made_by}"
        done = f"{stage:<9} done in {duration(self.progress.seconds)} for {usd(self.progress.usd)}"
        if self.progress.fraction is not None:
            self._pipeline.progress_artifacts.show(stage, 1.0, done)
        return done


@task(name="places", cache_policy=NO_CACHE, persist_result=False)
def _places(pipeline: Pipeline) -> State[Any]:
    try:
        check_pools(pipeline.run, pipeline.ahead, pipeline.stop)
    except StageStopped as stopped:
        return _cancelled(stopped)
    return Completed()


def places(pipeline: Pipeline) -> None:
    """Check that the pools of placed stages can run them, before anything costs money. Raises EnvironmentFault."""
    if placed_stages(pipeline.run, pipeline.ahead):
        _raise_if_stopped(_places(pipeline))


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(pipeline: Pipeline) -> None:
    """Close the run and write its HTML report. A report that cannot be written fails no run."""
    run = pipeline.run
    keep_copies(run)
    pipeline.end("completed")
    write_report(pipeline)
    do_light_stages(run.root, run.params)


data, sft, reward, evaluate = (stage_task(stage) for stage in ("data", "sft", "reward", "evaluate"))
_distill = stage_task("distill")
_METHODS = {method: stage_task(method) for method in METHODS}


def align(pipeline: Pipeline) -> None:
    """Run the stage of `align.method`; models of other methods are kept."""
    _METHODS[pipeline.run.params.align.method](pipeline)


def distill(pipeline: Pipeline) -> None:
    """Run `distill`, or record that params.yaml has no student."""
    if pipeline.run.params.distill is None:
        record_no_student(pipeline.run.root)
    else:
        _distill(pipeline)
