"""Progress, cost and ETA of a running stage, from the rows it appends."""

import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.alive import now
from config.jsonl import Follower
from config.methods.registry import OFFLINE_METHODS, SAMPLING_METHODS
from config.records import AttemptRow, MetricRow, UsageRow
from config.schema import Params
from config.terminal_text import visible
from costs.ledger.budget import Pace
from costs.tables.price import stage_price
from reporting.numbers import duration, usd
from tasks.planning.steps import planned_steps

MOST_AGE_SECONDS = 2.0
"""Oldest age of a row when it is read: rows are polled several times a second."""


class Progress(NamedTuple):
    stage: str
    step: int
    steps: int | None
    """Steps in all; None where they are not known beforehand."""
    seconds: float
    """Since the process began."""
    usd: float
    eta_seconds: float | None
    values: dict[str, float]
    """The newest training metrics."""

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.step / self.steps) if self.steps else None


def eta_seconds(steps: int, first: tuple[float, int], newest: tuple[float, int]) -> float | None:
    """Seconds left at the pace between two moments (time, step) of the same attempt; None before there is a pace."""
    took, done = newest[0] - first[0], newest[1] - first[1]
    return max(0, steps - newest[1]) * took / done if done > 0 else None


class Watch:
    """Follows the rows that come from now on: those of the attempts to be started."""

    PACE_WINDOW_SECONDS = 60.0
    """The estimate goes by the pace of the last minute: phases differ, and the machine may be shared."""

    def __init__(self, root: Path, params: Params, stage: str) -> None:
        folder = root / "runs" / stage
        self._stage, self._params = stage, params
        self._price = stage_price(params, stage)
        self._steps = planned_steps(root, params, stage)
        self._attempts, self._usage, self._metrics = (
            Follower(path, path.stat().st_size if path.exists() else 0)
            for path in (folder / "attempts.jsonl", folder / "usage.jsonl", folder / "metrics.jsonl")
        )
        self.attempt: AttemptRow | None = None
        """The newest row on the current attempt."""
        self.pace = Pace()
        """Durations of steps and checkpoints."""
        self.paid_usd = 0.0
        """Paid to others."""
        self._started: AttemptRow | None = None
        self._started_seen = 0.0
        self._start_usage: UsageRow | None = None
        self._step = 0
        self._values: dict[str, float] = {}
        self._moments: deque[tuple[float, int]] = deque()

    @property
    def began(self) -> float:
        """When the running process began, by the clock of config/alive.py.

        Now, before there is one: what waits in a queue costs nothing yet.
        """
        if self._started is None:
            return now()
        started, usage = self._started, self._start_usage
        loading = max(0.0, started.time - (usage.time - usage.seconds)) if usage else 0.0
        return self._started_seen - loading

    def look(self) -> Progress:
        """Read new rows."""
        for attempt in self._attempts.read(AttemptRow):
            self.attempt = attempt
            self._step = attempt.step
            if attempt.event == "start":
                self._started, self._started_seen, self._start_usage = attempt, now(), None
        for usage in self._usage.read(UsageRow):
            self.pace.add(usage, now() - _age(usage.time))
            self.paid_usd += usage.usd
            if usage.phase == "start":
                self._start_usage = usage
            if usage.step > self._step:
                self._step = usage.step
                if self._moments and usage.time < self._moments[-1][0]:
                    self._moments.clear()  # the clock was set back
                self._moments.append((usage.time, usage.step))
        while len(self._moments) > 2 and self._moments[-1][0] - self._moments[0][0] > self.PACE_WINDOW_SECONDS:
            self._moments.popleft()
        for metric in self._metrics.read(MetricRow):
            self._values = metric.values
        seconds = max(0.0, now() - self.began)
        world_size = self.attempt.world_size if self.attempt else 1
        return Progress(
            stage=self._stage,
            step=self._step,
            steps=self._steps,
            seconds=seconds,
            usd=self._price.usd(seconds, world_size) + self.paid_usd,
            eta_seconds=eta_seconds(self._steps, self._moments[0], self._moments[-1])
            if self._steps and self._moments
            else None,
            values=self._values,
        )


def _age(written: float) -> float:
    """Seconds since a row was written, by the clock that it names; 0 where that was set meanwhile, or is another
    machine's.
    """
    age = time.time() - written
    return age if 0 <= age <= MOST_AGE_SECONDS else 0.0


def attempts(root: Path, stage: str) -> list[AttemptRow]:
    """All rows of a stage's attempts.jsonl."""
    return jsonl.read(root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


SHOWN = {
    "sft": ("loss",),
    "reward": ("loss", "accuracy"),
    **dict.fromkeys(SAMPLING_METHODS, ("score", "kl")),
    **dict.fromkeys(OFFLINE_METHODS, ("loss", "margin")),
    "distill": ("loss", "agreement"),
    "evaluate": (),
}
"""Metrics worth a place in the line, per stage."""


def line(progress: Progress) -> str:
    """`sft       step 120 of 600, 42 s, $0.0012, 31 s left, loss 0.53`."""
    parts = [f"step {progress.step} of {progress.steps}"] if progress.steps else []
    parts += [duration(round(progress.seconds)), usd(progress.usd)]
    if progress.eta_seconds is not None:
        parts.append(f"{duration(round(progress.eta_seconds))} left")
    parts += [
        f"{name} {progress.values[name]:.3g}" for name in SHOWN.get(progress.stage, ()) if name in progress.values
    ]
    return f"{progress.stage:<9} {', '.join(parts)}"


class Display:
    """The progress line on stderr: rewritten in place on a terminal, else a new line now and then."""

    LINE_EVERY_SECONDS = 15.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._terminal:
            if now - self._last >= 0.5:
                self._write(f"\r\033[K{line(progress)}")
                self._last = now
        elif not self._last:
            self._last = now
        elif now - self._last >= self.LINE_EVERY_SECONDS:
            self._write(f"{line(progress)}\n")
            self._last = now

    def say(self, text: str) -> None:
        """Print a permanent line."""
        text = visible(text)
        self._write(f"\r\033[K{text}\n" if self._terminal else f"{text}\n")

    @staticmethod
    def _write(text: str) -> None:
        """A closed terminal, a pipe without reader or a full disk must not end training."""
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
