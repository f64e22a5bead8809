"""Progress of a run: finished stages, the running one, and those ahead, weighted by planned time."""

from collections.abc import Mapping
from typing import NamedTuple

from costs.ledger.budget import Cost, total
from reporting.numbers import duration, usd
from tasks.planning.prepared import Planned, Prepared
from tasks.stage.progress import Progress


class RunState(NamedTuple):
    """Progress of the run as a whole."""

    fraction: float
    eta_seconds: float
    usd: float
    """Cost of the run and of the unfinished ones it continues."""


class RunProgress:
    """Follows a run through its stages. Without a plan all stages count the same, and no time is known."""

    def __init__(self, prepared: Prepared, stages: tuple[str, ...]) -> None:
        self._ahead: Mapping[str, Cost] = {}
        if isinstance(prepared, Planned):
            self._ahead = prepared.ahead
        self._stages = stages
        self._usd = total(prepared.spent).usd
        self._max_usd = prepared.params.budget.max_usd
        self._weighed = bool(self._ahead)
        self._done: set[str] = set()

    def look(self, progress: Progress) -> RunState:
        """Progress while the stage of `progress` runs."""
        share = progress.fraction if progress.fraction is not None else self._share_by_time(progress)
        all_of_it = sum(self._weight(stage) for stage in self._stages)
        done = sum(self._weight(stage) for stage in self._done) + share * self._weight(progress.stage)
        ahead = sum(
            self._seconds(stage) for stage in self._stages if stage not in self._done and stage != progress.stage
        )
        remaining_seconds = (
            progress.eta_seconds if progress.eta_seconds is not None else (1 - share) * self._seconds(progress.stage)
        )
        return RunState(done / all_of_it if all_of_it else 0.0, remaining_seconds + ahead, self._usd + progress.usd)

    def close(self, progress: Progress | None, stage: str, done: bool) -> None:
        """A stage ended; one that was reused has no progress."""
        self._usd += progress.usd if progress else 0.0
        if done:
            self._done.add(stage)

    def words(self, run: RunState, stage: str) -> str:
        """`ppo running, about 2 min left, $0.0012 so far of budget.max_usd $0.01`."""
        eta = f", about {duration(round(run.eta_seconds))} left" if self._weighed else ""
        limit = f" of budget.max_usd {usd(self._max_usd)}" if self._max_usd is not None else ", no budget.max_usd"
        return f"{stage} running{eta}, {usd(run.usd)} so far{limit}"

    def _weight(self, stage: str) -> float:
        return self._seconds(stage) if self._weighed else 1.0

    def _seconds(self, stage: str) -> float:
        return self._ahead[stage].seconds if stage in self._ahead else 0.0

    def _share_by_time(self, progress: Progress) -> float:
        planned = self._seconds(progress.stage)
        return min(0.99, progress.seconds / planned) if planned else 0.0
