"""The stage contract: what every stage process does around its own work.

A stage reads params.yaml and its inputs, appends rows to runs/<stage>/, checkpoints, and puts complete outputs in
place. It ends with 0 (done), 2 (bad input: one clear line), 75 (asked to stop, checkpointed, resumable), or crashes.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import training
from config import jsonl
from config.differences import Watched, in_a_line, sections_of
from config.errors import DataError, ParamsError, StageStopped
from config.inputs import student_path
from config.load import load
from config.records import NO_RUN_ID, RUN_ID_VARIABLE, AttemptRow, MetricRow, kept_folder
from config.schema import Params
from config.stage_code import stage_code
from config.workspace.at_work import locked
from training.distributed import collectives
from training.process.checkpoint import DONE, Checkpoints, fingerprint
from training.process.device import device, device_name
from training.process.stopper import Stopper
from training.process.usage import Meter

logger = logging.getLogger("training")

Inputs = Sequence[str] | Callable[[Params], Sequence[str]]
"""Files and folders that a stage reads, relative to the project's folder; a function of the params if those name
them.
"""


class Stage:
    """A running stage in a folder: its params, its streams, its checkpoints, and whether it was asked to stop."""

    def __init__(self, name: str, sections: Sequence[str], inputs: Inputs, root: Path = Path()) -> None:
        """`sections` of params.yaml and `inputs` below `root` are what the outputs depend on, as in dvc.yaml."""
        self.name = name
        self.root = root
        self.params: Params = load(root / "params.yaml")
        self.run_id = os.environ.get(RUN_ID_VARIABLE, NO_RUN_ID)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.torch_device = device()
        self.device = device_name(self.torch_device)
        self.held = ExitStack()
        """The lock of the folder, for a stage that was started by hand."""
        self._folder = root / "runs" / name
        self._sections = sections
        self._inputs = inputs(self.params) if callable(inputs) else inputs
        kept = kept_folder(root, self.run_id) / "params.yaml"
        self.stopper = Stopper(Watched(root / "params.yaml", load(kept) if kept.exists() else self.params, sections))
        self.attempt = 1 + max(
            (row.attempt for row in jsonl.read(self._folder / "attempts.jsonl", AttemptRow).rows), default=0
        )
        self.step = 0
        self.fingerprint = ""
        self.resume_note = ""
        """Code files changed since the checkpoint that this attempt resumes from."""
        self.stopping = False
        """All processes of the stage have agreed to stop here."""
        self.meter = Meter(self._stream("usage"), self.run_id, self.attempt, self.device, self.world_size)

    def _stream(self, kind: str) -> Path | None:
        return self._folder / f"{kind}.jsonl" if self.rank == 0 else None

    def begin(self) -> None:
        """Record the start of the attempt, and determine its fingerprint.

        Raises DataError if an input is missing, ParamsError if the run it belongs to began with other params,
        EnvironmentFault if another process works in this folder.
        """
        if self.rank == 0 and not self.stopper.has_pipeline:
            self.held.enter_context(locked(self.root))
        sections = sections_of(self.params, self._sections)
        missing = next((item for item in self._inputs if not (self.root / item).exists()), None)
        if missing is None:
            self.fingerprint = fingerprint(
                sections, [self.root / item for item in [*self._inputs, *self._named_models()]], self.root
            )
        code = stage_code(Path(training.__path__[0]).parent, self.name)
        self.checkpoints = Checkpoints(self.root, self.name, self.fingerprint, code=code)
        self.mark("start")
        if missing is not None:
            raise DataError(
                f"{missing} does not exist, {self.name} needs it. Run the stage that makes it: "
                "rlhf run does all of them in order."
            )
        self.check_params()

    def _named_models(self) -> list[str]:
        """The local model folders that params.yaml names: the fingerprint includes their content."""
        named = [
            self.params.model.path if "model" in self._sections else None,
            student_path(self.params) if "distill" in self._sections else None,
        ]
        return [path for path in named if path is not None and (self.root / path).is_dir()]

    def finish(self, *outputs: str) -> None:
        """Record that all outputs are in place and remove the checkpoints; the last call of a stage."""
        if self.rank == 0:
            self.checkpoints.finish(self.step, outputs)

    def reuse_finished_outputs(self) -> bool:
        """Reuse the outputs of an earlier attempt with these parameters, inputs and code, if all are in place and
        unchanged. Returns whether they were reused. Collective.
        """
        step = collectives.broadcast_from_rank0(self.checkpoints.finished)
        if step is not None:
            self.step = step
            self.mark("resume")
            logger.info(
                "%s was done already: its outputs are in place. To do it again, remove %s",
                self.name,
                self.checkpoints.folder.parent / DONE,
            )
        return step is not None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row of training metrics."""
        self.step = step
        if path := self._stream("metrics"):
            row = MetricRow(time=time.time(), run_id=self.run_id, attempt=self.attempt, step=step, values=dict(values))
            jsonl.append(path, row)

    def mark(self, event: str, exit_code: int | None = None, message: str = "", lost_seconds: float = 0.0) -> None:
        """Append a row about the attempt itself."""
        if path := self._stream("attempts"):
            row = AttemptRow(
                time=time.time(),
                run_id=self.run_id,
                attempt=self.attempt,
                event=event,
                fingerprint=self.fingerprint,
                pid=self.stopper.launcher or os.getpid(),
                step=self.step,
                exit_code=exit_code,
                message=message,
                lost_seconds=lost_seconds,
                device=self.device,
                world_size=self.world_size,
            )
            jsonl.append(path, row)

    def resumed(self, step: int) -> None:
        """Record that work resumes from a checkpoint after `step`."""
        self.step = step
        self.mark("resume", message=self.resume_note)
        logger.info("%s resumes from its checkpoint after step %d", self.name, step)

    def retried(self, step: int, lost_seconds: float, message: str) -> None:
        """Record that `step` is repeated with a smaller micro-batch, and the time lost."""
        self.step = max(self.step, step - 1)
        self.mark("retry", message=message, lost_seconds=lost_seconds)
        logger.warning("%s; going on, %.1f s were lost", message, lost_seconds)

    def check_params(self) -> None:
        """Raise an error if params.yaml has changed since the start: DVC would record the new values for outputs of
        the old ones. Call before outputs are put in place.

        Raises ParamsError.
        """
        if changed := self.stopper.params_file.differences():
            raise ParamsError(
                f"params.yaml changed while {self.name} was running: {in_a_line(changed)}. "
                "The record would name values that did not make the result, so none is recorded, "
                f"and checkpoints are kept up to step {self.step}. Put the old value back and run again to go on, "
                "or run again to begin with the new one."
            )

    def stop_if_requested(self) -> None:
        """Exit if the stage must stop. Call where everything worth keeping is saved."""
        if self.stopper.must_stop():
            raise self.stopped()

    def synchronise_stop(self) -> bool:
        """Collective: set and return `stopping`, which is true if any process of the stage must stop.

        Call it once a step, before deciding on a checkpoint: a request that comes later waits for the next step.
        """
        self.stopping = collectives.all_reduce_max(self.stopper.must_stop()) > 0
        return self.stopping

    def stopped(self) -> StageStopped:
        """The exception to raise once everything is saved. Raises ParamsError instead if the stage stops because
        params.yaml changed.
        """
        if not self.stopper.requested:
            self.check_params()
        return StageStopped(
            f"{self.name} was asked to stop: checkpointed after step {self.step}, run again to go on from there."
        )

    @property
    def interactive(self) -> bool:
        """Whether stderr is a terminal: progress bars make sense."""
        return self.rank == 0 and sys.stderr.isatty()
