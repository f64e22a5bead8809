"""Measures the resources of a stage: wall seconds, tokens and peak memory, per step and phase."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from config import jsonl
from config.alive import created, now
from config.records import UsageRow
from training.process import allocator


@dataclass
class Work:
    """Work of a phase, counted by its caller."""

    tokens: int = 0
    """Real tokens, padding not counted."""
    sequences: int = 0
    usd: float = 0.0
    """Paid to others, in US dollars."""
    book: Callable[["Work"], None] = lambda work: None
    """Writes a row for what was paid just now."""

    def add(self, tokens: int = 0, sequences: int = 0) -> None:
        self.tokens += tokens
        self.sequences += sequences

    def pay(self, tokens: int, usd: float) -> None:
        """Record tokens that an outside service processed, and what it charged, in a row of their own: what was paid
        is known however the phase ends.
        """
        self.book(Work(tokens, usd=usd))


class Meter:
    """Appends one UsageRow per step and phase. Time between phases is kept and reported as the phase `other`."""

    def __init__(self, path: Path | None, run_id: str, attempt: int, device: str, world_size: int) -> None:
        """`path` None measures without writing: every rank but 0."""
        self._path = path
        self._identity = {"run_id": run_id, "attempt": attempt, "device": device, "world_size": world_size}
        self._accelerator = device != "cpu"
        self._last_end = created(os.getpid())
        self._other_seconds = 0.0
        self._started = False

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Work]:
        """Time a block as phase `name` of `step`. A block that raises is recorded too: its time was paid for."""
        begin = now()
        gap = max(0.0, begin - self._last_end)
        if not self._started:
            self._append("start", 0, gap, Work())
            self._started = True
        else:
            self._other_seconds += gap
        if not self._accelerator:
            allocator.release_free_memory()
        reset_peak_memory(self._accelerator)
        work = Work(book=lambda paid: self._append(name, step, 0.0, paid))
        try:
            yield work
        finally:
            self._synchronise()
            self._append(name, step, now() - begin, work)
            self._last_end = now()

    def lap(self, name: str, step: int, work: Work) -> None:
        """Account all time since the last phase to `name`, for loops of other libraries."""
        self._synchronise()
        at = now()
        if not self._started:
            name, self._started = "start", True
        self._append(name, step, max(0.0, at - self._last_end), work)
        self._last_end = at
        reset_peak_memory(self._accelerator)

    def unaccounted_seconds(self) -> float:
        """Since the last phase or lap."""
        return max(0.0, now() - self._last_end)

    def close(self, step: int) -> None:
        """Write the time outside of every phase, so that the rows add up to the process's wall time."""
        self._other_seconds += max(0.0, now() - self._last_end)
        self._append("other" if self._started else "start", step, self._other_seconds, Work())
        self._last_end, self._other_seconds = now(), 0.0

    def _synchronise(self) -> None:
        if self._accelerator:
            torch.accelerator.synchronize()

    def _append(self, phase: str, step: int, seconds: float, work: Work) -> None:
        if self._path is None:
            return
        row = UsageRow(
            time=time.time(),
            step=step,
            phase=phase,
            seconds=seconds,
            tokens=work.tokens,
            sequences=work.sequences,
            usd=work.usd,
            peak_bytes=peak_memory_bytes(self._accelerator),
            **self._identity,
        )
        jsonl.append(self._path, row)


def peak_memory_bytes(accelerator: bool) -> int:
    """Peak since the last reset: the allocator's on an accelerator, the resident set on CPU."""
    if accelerator:
        return torch.accelerator.max_memory_allocated()
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(accelerator: bool) -> None:
    """Start a new peak. On Linux, 5 written to clear_refs resets the resident set's high-water mark (proc(5));
    elsewhere it stays.
    """
    if accelerator:
        torch.accelerator.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
