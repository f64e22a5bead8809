"""The context that every task of a run works in: it holds the workspace, ships rows, and always records the end of the
run.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed

from config.alive import created, now
from config.differences import in_a_line
from config.errors import EnvironmentFault, OverBudget, RlhfError, StageStopped
from config.workspace.at_work import locked
from config.workspace.checkout import commit_of, git
from config.workspace.rows import ENDED, pipeline_rows
from costs.ledger.ledger import BEGAN, read_ledger
from costs.ledger.reconcile import read_plan
from costs.ledger.timed import remember
from reporting.build import build_report, build_summary
from tasks.cluster.placement import fetch_aligned
from tasks.dvc.transfers import default_remote, public, push
from tasks.pipeline.run_progress import RunProgress
from tasks.planning.prepared import Planned, Prepared, keep
from tasks.run.purse import PURPOSE
from tasks.run.run import STUDY, Run, begin_run, end_left_open, keep_copies, keep_edits, new_run_id, put_params_back
from tasks.run.stop import OVER_BUDGET, STOPPED, StopRequest, on_signals
from tasks.servers.lost_server import hang_up, is_gone
from tasks.servers.processes import servers
from tasks.stage.paid import charge_killed
from tasks.stage.progress import Display
from tasks.ui.events import RunEvent, run_event
from tasks.ui.links import pages
from tasks.ui.progress_artifact import ProgressArtifacts
from tasks.ui.summary import markdown, verdict_and_ledger
from tracking.shipper import Shipper

logger = logging.getLogger(__name__)

ARTIFACT_PATIENCE_SECONDS = 5.0
"""Seconds to show the last progress."""


class Pipeline:
    """A running pipeline run."""

    def __init__(
        self, run: Run, stop: StopRequest, shipper: Shipper, run_progress: RunProgress, ahead: Sequence[str]
    ) -> None:
        self.run, self.stop, self.shipper, self.run_progress = run, stop, shipper, run_progress
        self.ahead = ahead
        """Stages that have to run."""
        self.display, self.progress_artifacts = Display(), ProgressArtifacts()
        self.report: Path | None = None
        self.state: State[Any] = Completed()
        """Final state of the flow, unless it fails."""
        self._ended = False

    def end(self, state: str, message: str = "") -> None:
        """Record the end of the run, once: a run that has completed does not fail later."""
        if not self._ended:
            self._ended = True
            detail = {"message": message} if message else {}
            self.run.record("end", state=state, detail=detail)
            remember_cost(self.run)


@contextmanager
def pipeline_run(prepared: Prepared) -> Iterator[Pipeline]:
    """Hold the workspace (the current folder) for one run, ship its rows meanwhile, and see to it that the run has an
    end.

    A stop is not a failure: the block ends there, and `Pipeline.state` says so. A run of a deployment waits for
    another one that is running here; any other raises EnvironmentFault.
    """
    root, params = Path.cwd(), prepared.params
    with on_signals() as stop, locked(root, _patience(stop) if deployment.id else None):
        end_left_open(root)
        charge_killed(root)
        before = (root / "params.yaml").read_bytes() if (root / "params.yaml").exists() else None
        edited = keep_edits(root, params)
        if edited is not None:
            Display().say(f"params.yaml held other values, which no run has kept: they are in {edited.name}.")
        run = begin_run(root, new_run_id(flow_run.name), params, _detail(root, prepared))
        keep(run.folder, prepared)
        shipper = Shipper(root, params, run.run_id)
        shipper.start()
        ahead = tuple(prepared.ahead) if isinstance(prepared, Planned) else params.stages
        pipeline = Pipeline(run, stop, shipper, RunProgress(prepared, params.stages), ahead)
        pipeline.progress_artifacts.start()
        try:
            yield pipeline
        except StageStopped as stopped:
            over = isinstance(stopped, OverBudget)
            pipeline.state = Cancelled(name=OVER_BUDGET if over else STOPPED, message=str(stopped))
            _end(pipeline, "over_budget" if over else "stopped", str(stopped))
        except BaseException as error:
            _end(pipeline, "failed", f"{type(error).__name__}: {error}")
            _put_params_back(pipeline, before, edited)
            raise
        else:
            _bring_model(pipeline)
            pipeline.progress_artifacts.show("run", 1.0, "completed")
            _send(pipeline)
            _announce(pipeline, "finished", "")
        finally:
            run.record("left")


def _put_params_back(pipeline: Pipeline, before: bytes | None, copy: Path | None) -> None:
    """Errors are ignored, because they must not hide why the run failed. Afterwards `copy` of the earlier file is not
    needed any more.
    """
    try:
        undone = put_params_back(pipeline.run, before)
        if undone and copy is not None:
            copy.unlink()
    except (OSError, RlhfError) as error:
        logger.warning("whether params.yaml has to be put back is not known: %s", error)
        return
    if undone:
        pipeline.display.say(
            f"params.yaml is what it was before this run, which did not get past its data: without {in_a_line(undone)}"
        )


def _patience(stop: StopRequest) -> Callable[[str], bool]:
    """A run that a server started waits for one from the command line, unless it is asked to stop."""
    notified: set[str] = set()

    def wait(holder: str) -> bool:
        if holder not in notified:
            notified.add(holder)
            logger.warning("process %s is running the pipeline in this checkout: waiting for its end", holder)
        return not stop.requested

    return wait


def _end(pipeline: Pipeline, state: RunEvent, message: str) -> None:
    """Close an unfinished run with a report of what it did; the current report belongs to an earlier run."""
    pipeline.end(state, message)
    write_report(pipeline)
    _send(pipeline)
    _announce(pipeline, state, message)


def write_report(pipeline: Pipeline) -> None:
    """Write the report and the summary of a run that has ended, and keep the run's own copies. An error here neither
    fails a run nor hides why it failed.
    """
    run = pipeline.run
    try:
        pipeline.report = build_report(run.root, run.params, run.run_id)
        build_summary(run.root, run.params, run.run_id)
    except Exception as error:
        logger.warning("the report could not be written", exc_info=True)
        pipeline.display.say(f"warning: the report could not be written: {error}")
    try:
        keep_copies(run, pipeline.report)
    except OSError as error:
        pipeline.display.say(f"warning: the run's own copies could not be kept: {error}")


def _announce(pipeline: Pipeline, state: RunEvent, message: str) -> None:
    """Plan and result as an artifact with links to the pages of the run, and an event; whatever Prefect says to that,
    the run has ended.
    """
    run = pipeline.run
    if deployment.id is None and is_gone():
        hang_up()
        return
    pipeline.progress_artifacts.close(ARTIFACT_PATIENCE_SECONDS)
    try:
        judged, ledger = verdict_and_ledger(run)
        run_event(state, run.run_id, message or judged, usd=ledger.total_usd, seconds=ledger.total_seconds)
        links = pages(run.root, run.params, servers(run.root), run.run_id)
        content = markdown(run, pipeline.report, {name: url for name, url in links.items() if name != "prefect"})
        create_markdown_artifact(
            content, key="result", description="What the run was planned to cost, what it cost, and what it bought"
        )
    except Exception as error:  # noqa: BLE001 -- Prefect's server may be gone, and its client raises what it likes
        logger.warning("the result could not be shown in the Prefect UI: %s", error)


def _bring_model(pipeline: Pipeline) -> None:
    """A model that was aligned elsewhere comes here to be registered; that cannot fail the run."""
    try:
        fetch_aligned(pipeline.run)
    except EnvironmentFault as fault:
        logger.warning("%s", fault)
        pipeline.display.say(f"warning: {fault}")


def remember_cost(run: Run) -> None:
    """Record what the stages took for the plans to come; this cannot fail the run."""
    try:
        ledger = read_ledger(run.root, run.params, run.run_id)
        remember(run.root, ledger, read_plan(run.folder))
    except (OSError, RlhfError) as error:
        logger.warning("what the stages took could not be kept for later plans: %s", error)


def _send(pipeline: Pipeline) -> None:
    """Outputs to the DVC remote, the last rows and the model to MLflow meanwhile; neither can fail the run, and a
    (further) request to stop ends the waiting.
    """
    requests = pipeline.stop.requests

    def give_up() -> bool:
        return pipeline.stop.requests > requests

    pipeline.shipper.end()
    for fault in (push(pipeline.run.root), pipeline.shipper.finish(give_up)):
        if fault:
            logger.warning("%s", fault)
            pipeline.display.say(f"warning: {fault}")


def _detail(root: Path, prepared: Prepared) -> dict[str, Any]:
    """Where the run comes from, for the tracker, and which run it goes on from."""
    ends = [row.time for row in pipeline_rows(root) if row.event in ENDED]
    detail: dict[str, Any] = {
        BEGAN: max([time.time() - (now() - created(os.getpid())), *ends[-1:]]),
        "continues": prepared.continues,
        "dvc.remote": public(default_remote(root)),
        "git.commit": commit_of(root),
        "prefect.flow_run_id": flow_run.id,
        PURPOSE: flow_run.parent_flow_run_id if PURPOSE in (flow_run.tags or []) else None,
        "study": next((tag.removeprefix(STUDY) for tag in flow_run.tags or [] if tag.startswith(STUDY)), None),
    }
    if detail["git.commit"]:
        detail["git.dirty"] = str(bool(git(root, "status", "--porcelain", "--untracked-files=no")))
    return {key: value for key, value in detail.items() if value}
