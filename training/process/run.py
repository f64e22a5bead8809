"""Runs a stage as a process: signals, logging, exit codes and the last rows of its ledger."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from config.errors import EXIT_CRASHED, EXIT_DONE, CheckpointError, EnvironmentFault, RlhfError, StageStopped
from config.methods.registry import stage_module
from config.records import CHANGED_CODE_VARIABLE, CONTINUE, RESTART
from config.stage_code import some
from training.distributed import collectives
from training.process import allocator, garbage_collection
from training.process.faults import is_out_of_memory, named_fault
from training.process.stage import Inputs, Stage

logger = logging.getLogger("training")

NO_MEMORY = (
    "out of memory, and no smaller pieces would help here. Take a smaller model, or a device with "
    "more memory: see rlhf plan."
)
LOST_PEER = "another process of the stage exited without an error message: what it printed comes before this."


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
    """Arguments of `run_stage` after the name."""

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


def resolve_changed_code(stage: Stage) -> None:
    """If other code made the newest checkpoint: resume from it or start over, as RLHF_CHANGED_CODE says.

    Raises CheckpointError if it is not set.
    """
    checkpoint = stage.checkpoints.latest()
    changed = stage.checkpoints.changed_code(checkpoint) if checkpoint else []
    if checkpoint is None or not changed:
        return
    change = f"other code made the checkpoint after step {checkpoint.step}: {some(changed)} changed since."
    answer = os.environ.get(CHANGED_CODE_VARIABLE)
    if answer == RESTART:
        stage.checkpoints.ignore_other_code()
        logger.warning("%s starts over: %s", stage.name, change)
    elif answer == CONTINUE:
        stage.resume_note = f"with changed code: {some(changed, len(changed))}"
    else:
        raise CheckpointError(
            f"{change} Set {CHANGED_CODE_VARIABLE}={CONTINUE} to resume from it or {RESTART} to start over; with "
            f"rlhf run, --changed-code {CONTINUE} or {RESTART}."
        )


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
        signal.signal(number, stage.stopper.request)
    # training.process.launch blocked them until now
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
    code, message = EXIT_CRASHED, ""
    try:
        stage.begin()
        collectives.join(name, stage.torch_device)
        torch.manual_seed(stage.params.seed)
        if not stage.reuse_finished_outputs():
            resolve_changed_code(stage)
            work(stage)
        stage.check_params()
        code = EXIT_DONE
        collectives.leave()
    except StageStopped as stopped:  # all processes have agreed on the step
        code, message = stopped.exit_code, str(stopped)
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
