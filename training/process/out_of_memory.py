"""Out-of-memory handling: work is repeated with micro-batches of half the size, with the same result up to rounding.

The batch of an optimizer step stays the same, however it is split. All processes of a stage halve together: where they
meet after the work, all do it again; where one fails in the middle of a step that all take together, the others wait
in it forever, so it leaves the smaller size beside the checkpoints, and all processes start again with that
(training/process/launch.py).
"""

import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from config.errors import EnvironmentFault, SmallerPieces
from training.distributed import collectives
from training.process.artifacts import write_json
from training.process.faults import is_out_of_memory
from training.process.stage import Stage

logger = logging.getLogger(__name__)

T = TypeVar("T")
PIECES = "pieces.json"
"""File beside the checkpoints."""


class OomBackoff:
    """Micro-batch size of a stage: as in params.yaml, or smaller after running out of memory."""

    def __init__(self, stage: Stage, name: str, size: int) -> None:
        """`name` of the parameter with the initial size."""
        self._stage = stage
        self._name = name
        self.size = size
        saved = self._reduced_sizes().get(name, size)
        if saved < size:
            self.size = saved
            stage.mark("retry", message=f"after an attempt out of memory: {name} {size} -> {saved}")

    def _reduced_sizes(self) -> dict[str, int]:
        """Sizes left by an attempt with the same number of processes that ran out of memory."""
        try:
            sizes = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return dict(sizes["sizes"]) if sizes["processes"] == self._stage.world_size else {}

    @property
    def _path(self) -> Path:
        return self._stage.checkpoints.folder / PIECES

    def run(self, work: Callable[[int], T], step: int, lockstep: bool = False) -> T:
        """Call `work` with the size, halving it whenever a process runs out of memory; `work` must start afresh every
        time. Returns its result.

        Raises EnvironmentFault if pieces of size 1 do not fit, and SmallerPieces where processes work in `lockstep`,
        as the others wait in a collective.
        """
        while True:
            began, result = time.monotonic(), None
            try:
                result = work(self.size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if lockstep:
                    self.start_again(step, error)
                failed = True
            else:
                failed = False
            if not collectives.all_reduce_max(failed):
                return result  # type: ignore[return-value] # it is what work gave
            self.halve(step, time.monotonic() - began)

    def start_again(self, step: int, error: BaseException) -> NoReturn:
        """Restart all processes with half the size from the last checkpoint. Raises SmallerPieces, EnvironmentFault if
        the size is 1.
        """
        release()
        if self.size == 1:
            raise self._smallest(step)
        half = self.size // 2
        sizes = {**self._reduced_sizes(), self._name: half}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"processes": self._stage.world_size, "sizes": sizes})
        raise SmallerPieces(
            f"out of memory at step {step} in one of {self._stage.world_size} processes: "
            f"{self._name} {self.size} -> {half}. All start again from the last checkpoint."
        ) from error

    def _smallest(self, step: int) -> EnvironmentFault:
        return EnvironmentFault(
            f"out of memory at step {step} with {self._name}=1, the smallest possible. Take a smaller model, "
            "shorter sequences, or a device with more memory; rlhf plan says what is needed."
        )

    def halve(self, step: int, lost_seconds: float) -> None:
        """Continue with half the size, and record it. Raises EnvironmentFault if the size is 1."""
        release()
        if self.size == 1:
            raise self._smallest(step)
        before, self.size = self.size, self.size // 2
        self._stage.retried(step, lost_seconds, f"out of memory at step {step}: {self._name} {before} -> {self.size}")


def halving(work: Callable[[int], T], size: int, name: str) -> T:
    """`OomBackoff.run` for processes that are not stages.

    Raises EnvironmentFault if a size of 1 does not fit.
    """
    while True:
        try:
            return work(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise EnvironmentFault(
                    f"out of memory with {name}: 1, the smallest possible. Take a device with more memory."
                ) from error
        release()
        logger.warning("out of memory: %s %d -> %d", name, size, size // 2)
        size //= 2


def release() -> None:
    """Release the memory of the failed work."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
