"""The stage contract: what every stage process does around its own work.

A stage reads params.yaml and its inputs, appends rows to runs/<stage>/, checkpoints, and puts complete outputs in
place. It ends with 0 (done), 2 (bad input: one clear line), 75 (asked to stop, checkpointed, resumable), or crashes.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import transformers

import training
from config import jsonl
from config.alive import is_alive
from config.differences import Watched, in_a_line, sections_of
from config.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    CheckpointError,
    DataError,
    EnvironmentFault,
    ParamsError,
    RlhfError,
    StageStopped,
)
from config.inputs import student_path
from config.load import load
from config.methods.registry import stage_module
from config.records import (
    CHANGED_CODE_VARIABLE,
    CONTINUE,
    LAUNCHER_VARIABLE,
    NO_RUN_ID,
    PIPELINE_VARIABLE,
    RESTART,
    RUN_ID_VARIABLE,
    AttemptRow,
    MetricRow,
    UsageRow,
    kept_folder,
)
from config.schema import Params
from config.stage_code import some, stage_code
from config.workspace.at_work import locked
from training.distributed import collectives
from training.process import allocator, garbage_collection
from training.process.checkpoint import DONE, Checkpoints, fingerprint
from training.process.device import device, device_name
from training.process.faults import is_out_of_memory, named_fault
from training.process.usage import Meter

logger = logging.getLogger("training")

NO_MEMORY = (
    "out of memory, and no smaller pieces would help here. Take a smaller model, or a device with "
    "more memory: see rlhf plan."
)
LOST_PEER = "another process of the stage exited without an error message: what it printed comes before this."

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
        self._launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
        self._pipeline = os.environ.get(PIPELINE_VARIABLE)
        self.held = ExitStack()
        """The lock of the folder, for a stage that was started by hand."""
        self._folder = root / "runs" / name
        self._sections = sections
        self._inputs = inputs(self.params) if callable(inputs) else inputs
        kept = kept_folder(root, self.run_id) / "params.yaml"
        self._params_file = Watched(root / "params.yaml", load(kept) if kept.exists() else self.params, sections)
        self.attempt = 1 + max(
            (row.attempt for row in jsonl.read(self._folder / "attempts.jsonl", AttemptRow).rows), default=0
        )
        self.step = 0
        self.fingerprint = ""
        self._resume_note = ""
        """Code files changed since the checkpoint that this attempt resumes from."""
        self.stop_requested = False
        """This process was asked to stop."""
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
        if self.rank == 0 and self._pipeline is None:
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

    def resolve_changed_code(self) -> None:
        """If other code made the newest checkpoint: resume from it or start again, as the environment or the user at
        the terminal decides.

        Raises CheckpointError without a decision.
        """
        checkpoint = self.checkpoints.latest()
        changed = self.checkpoints.changed_code(checkpoint) if checkpoint else []
        if checkpoint is None or not changed:
            return
        seconds = self._seconds_to(checkpoint.step)
        change = (
            f"other code made the checkpoint after step {checkpoint.step}: {some(changed)} changed "
            "since. "
            f"Starting over takes the {seconds:.0f} s again that were measured up to there."
        )
        answer = os.environ.get(CHANGED_CODE_VARIABLE) or self._asked(change)
        if answer == RESTART:
            self.checkpoints.ignore_other_code()
            logger.warning("%s starts over: %s", self.name, change)
        elif answer == CONTINUE:
            self._resume_note = f"with changed code: {some(changed, len(changed))}"
        else:
            raise CheckpointError(
                f"{change} Say {CHANGED_CODE_VARIABLE}={CONTINUE} or {RESTART}; to rlhf run, "
                f"--changed-code {CONTINUE} or {RESTART}."
            )

    def _asked(self, change: str) -> str:
        """The user's answer, "" if stdin is not a terminal."""
        if self.world_size > 1 or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return ""
        print(
            f"{self.name}: {change} Go on from it, or start over? [c]ontinue, [r]estart: ",
            file=sys.stderr,
            end="",
            flush=True,
        )
        words = sys.stdin.readline().strip().lower()
        return next((answer for answer in (CONTINUE, RESTART) if words and answer.startswith(words)), "")

    def _seconds_to(self, step: int) -> float:
        """Seconds of the work up to `step` without repetitions: for each step and phase the last row among attempts
        with this fingerprint.
        """
        events = jsonl.read(self._folder / "attempts.jsonl", AttemptRow).rows
        attempts = {row.attempt for row in events if row.fingerprint == self.fingerprint}
        rows = jsonl.read(self._folder / "usage.jsonl", UsageRow).rows
        last = {
            (row.step, row.phase): row.seconds for row in rows if row.attempt in attempts and 1 <= row.step <= step
        }
        return sum(last.values())

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
                pid=self._launcher or os.getpid(),
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
        self.mark("resume", message=self._resume_note)
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
        if changed := self._params_file.differences():
            raise ParamsError(
                f"params.yaml changed while {self.name} was running: {in_a_line(changed)}. The "
                "record would name values that did not make the "
                f"result, so none is recorded, and checkpoints are kept up to step {self.step}. "
                "Put the old value back and run again to go on, "
                "or run again to begin with the new one."
            )

    def _params_changed(self) -> bool:
        """params.yaml may be unreadable while it is being written: the next check decides."""
        try:
            return bool(self._params_file.differences())
        except ParamsError:
            return False

    def stop_if_requested(self) -> None:
        """Exit if asked to stop, orphaned, or params.yaml changed. Call where everything worth keeping is saved."""
        if self.stop_requested or self.orphaned or self._params_changed():
            raise self.stopped()

    def synchronise_stop(self) -> bool:
        """Collective: set and return `stopping`, which is true if any process of the stage was asked to stop, lost its
        parent or found params.yaml changed.

        Call it once a step, before deciding on a checkpoint: a request that comes later waits for the next step.
        """
        wanted = self.stop_requested or self.orphaned or self._params_changed()
        self.stopping = collectives.all_reduce_max(wanted) > 0
        return self.stopping

    @property
    def orphaned(self) -> bool:
        """Whether the launcher, or the pipeline process that watches the budget, is gone."""
        if self._launcher not in (0, os.getppid()):
            return True
        pid, _, created = (self._pipeline or "").partition(":")
        return bool(pid) and not is_alive(int(pid), float(created))

    def stopped(self) -> StageStopped:
        """The exception to raise once everything is saved. Raises ParamsError instead if the stage stops because
        params.yaml changed.
        """
        if not self.stop_requested:
            self.check_params()
        return StageStopped(
            f"{self.name} was asked to stop: checkpointed after step {self.step}, run again to go on from there."
        )

    @property
    def interactive(self) -> bool:
        """Whether stderr is a terminal: progress bars make sense."""
        return self.rank == 0 and sys.stderr.isatty()

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that stop a stage; SIGHUP of a lost terminal too, unless nohup ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def configure_process() -> None:
    """Process-wide settings of a stage: memory and logging."""
    garbage_collection.begin_work()
    allocator.configure()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if first else logging.ERROR, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S"
    )


class Entry(NamedTuple):
    """What a stage process reads and runs: the arguments of `run_stage` after the name."""

    sections: tuple[str, ...]
    inputs: Inputs
    work: Callable[[Stage], None]


def entry(stage: str) -> Entry:
    """The entry of `stage` in its module: SECTIONS (plus the stage's own, if the module serves several stages),
    INPUTS, and the function with the module's name.
    """
    name = stage_module(stage)
    module: Any = import_module(name)
    sections = module.SECTIONS if stage in module.SECTIONS else (*module.SECTIONS, stage)
    return Entry(sections, module.INPUTS, getattr(module, name.rsplit(".", 1)[1]))


def run_stage(name: str, sections: Sequence[str], inputs: Inputs, work: Callable[[Stage], None]) -> int:
    """Run `work` as the stage process `name` in the current folder; returns the exit code."""
    configure_process()
    try:
        stage = Stage(name, sections, inputs)
    except RlhfError as error:
        collectives.report_fault(f"{name}: {error}")
        return error.exit_code
    if not stage.interactive:
        transformers.utils.logging.disable_progress_bar()
    for number in stop_signals():
        signal.signal(number, stage.request_stop)
    # training.process.launch blocked them until now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
    code, message = EXIT_CRASHED, ""
    try:
        stage.begin()
        collectives.join(name, stage.torch_device)
        torch.manual_seed(stage.params.seed)
        if not stage.reuse_finished_outputs():
            stage.resolve_changed_code()
            work(stage)
        stage.check_params()
        code = EXIT_DONE
        collectives.leave()
    except RlhfError as error:
        code, message = error.exit_code, str(error)
    except Exception as error:
        fault = EnvironmentFault(NO_MEMORY) if is_out_of_memory(error) else named_fault(error, Path.cwd())
        if isinstance(fault, RlhfError):
            code, message = fault.exit_code, str(fault)
        elif not collectives.is_lost_peer(error):
            message = f"{type(error).__name__}: {error}"
            raise
        elif (peer_fault := collectives.fault_of_peer()) is not None:
            message = peer_fault.removeprefix(f"{name}: ")
        else:
            message = LOST_PEER
            raise
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        if message:
            collectives.report_fault(f"{name}: {message}")
        try:
            stage.meter.close(stage.step)
            stage.mark("end", code, message)
        # a full disk has no room for these rows either: keep the message above visible
        except OSError as error:
            logger.warning("the last rows of runs/%s could not be written: %s", name, error)
        stage.held.close()
    return code
