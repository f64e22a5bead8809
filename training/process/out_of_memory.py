"""Memory that does not suffice: work is done again in pieces of half the size, with the same result
to rounding.

A piece is what one forward pass takes; what is learnt from is the whole batch, however it was cut.
All processes of a stage halve together.
"""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from config.errors import EnvironmentFault
from training.distributed import collectives
from training.process.faults import is_out_of_memory
from training.process.stage import Stage

T = TypeVar("T")


class OomBackoff:
    """The size of the pieces that a stage's work is done in: as params.yaml says, or smaller since
    memory did not suffice.
    """

    def __init__(self, stage: Stage, name: str, size: int) -> None:
        """`name` of the parameter that `size` comes from."""
        self._stage = stage
        self._name = name
        self.size = size

    def run(self, work: Callable[[int], T], step: int, lockstep: bool = False) -> T:
        """What `work` gives for a size, halved as often as one process runs out of memory in it;
        `work` must start afresh every time.

        Raises EnvironmentFault if pieces of size 1 do not fit, or the first time where processes
        work `lockstep`: the others wait for a piece that does not come.
        """
        while True:
            began, result = time.monotonic(), None
            try:
                result = work(self.size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if lockstep:
                    raise EnvironmentFault(
                        f"out of memory at step {step} with {self._name}={self.size} in one of "
                        f"{self._stage.world_size} processes that share "
                        f"their weights. Lower {self._name} in params.yaml, and start again: it "
                        "goes on from its last checkpoint."
                    ) from error
                failed = True
            else:
                failed = False
            if not collectives.all_reduce_max(failed):
                return result  # type: ignore[return-value] # it is what work gave
            self.halve(step, time.monotonic() - began)

    def halve(self, step: int, lost_seconds: float) -> None:
        """Go on with half the size, and record it. Raises EnvironmentFault if there is no half."""
        release()
        if self.size == 1:
            raise EnvironmentFault(
                f"out of memory at step {step} with {self._name}=1, the smallest there is. Take a "
                "smaller model, shorter sequences, or a "
                "device with more memory; rlhf plan says what is needed."
            )
        before, self.size = self.size, self.size // 2
        self._stage.retried(
            step,
            lost_seconds,
            f"out of memory at step {step}: {self._name} {before} -> {self.size}",
        )


def release() -> None:
    """Give back what the failed work held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
