"""The ledger: the cost of a pipeline run per stage and phase, from the rows of its stage processes.

usd = seconds x devices paid for x usd_per_device_hour / 3600, summed over the usage rows of every attempt of the run,
failed ones included. Paid for are the processes of a row (`world_size`), and those that are rented with them and wait
(`rented_devices`). Electricity is in the hourly price where it is paid apart: both see costs/tables/price.py.

- A stage that DVC found unchanged cost nothing in this run; `saved_usd` says what making its
  outputs had cost.
- An attempt killed by kill -9 has no `end` row: it lasted from its start to its last row, and the
  time that no phase accounts for
  is the phase `other`.
- Waste is the work of unfinished attempts that had to be done again: see costs/ledger/attempts.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import jsonl
from config.errors import CostError
from config.records import LOOPS, NO_RUN_ID, STAGES, MetricRow, PipelineRow, UsageRow
from config.schema import Params
from config.terminal_text import shown
from config.workspace.at_work import run_at_work
from config.workspace.rows import PIPELINE
from costs.ledger.attempts import Attempt, read_attempts, split_usage
from costs.tables.price import StagePrice, stage_price, usd_of, usd_per_device_hour

BEGAN = "began"
"""Key of a run's first row: when its process began, or the run before it in the process ended."""
EQUAL_GROUPS = {
    "rollout": "equal_groups",
    "score": "equal_groups",
    "logprobs": "equal_groups_taken",
    "reference": "equal_groups_taken",
}
"""Phase of a loop that is for one response each -> metric of an update: the share of the prompts that it is for whose
responses all scored alike.
"""
RUNNING = "running"
"""State of a running run, and of its stage."""


@dataclass(frozen=True)
class PhaseCost:
    phase: str
    seconds: float
    tokens: int
    sequences: int
    usd: float
    peak_bytes: int
    """Highest peak among the rows of the phase."""


@dataclass(frozen=True)
class AttemptCost:
    """One process of a stage."""

    attempt: int
    state: str
    """done, stopped (resumable), failed, or unfinished (killed, or still running)."""
    resumed_step: int
    """Step of the checkpoint that it resumed from, 0 without one."""
    seconds: float
    usd: float


@dataclass(frozen=True)
class StageCost:
    stage: str
    cached: bool
    """No process of this stage ran in this run: DVC found its outputs valid."""
    state: str
    """cached, done, running, stopped (resumable), failed, or unfinished (killed)."""
    message: str
    """The last attempt's message when it failed or stopped."""
    attempt: int | None
    """Number of the attempt whose outputs the run uses, None if there are none."""
    attempts: int
    failed_attempts: int
    """Attempts that did not finish, including stopped ones."""
    device: str
    world_size: int
    usd_per_device_hour: float
    """Price of the hardware that the stage is placed on."""
    seconds: float
    device_seconds: float
    """seconds x devices in use, of every row."""
    rented: int
    """Devices paid for while the stage runs, if it uses fewer."""
    idle_usd: float
    """The part of `usd` for idle devices."""
    usd: float
    waste_seconds: float
    waste_usd: float
    memory_retries: int
    """Steps repeated with smaller micro-batches after running out of memory; the first tries are waste."""
    saved_seconds: float
    """Time that the attempts behind the outputs of a cached stage took, without their waste."""
    saved_usd: float
    peak_bytes: int
    phases: tuple[PhaseCost, ...]
    taught_nothing_usd: float = 0.0
    """The part of `usd` for responses that were all scored alike beside the others to their prompt: sampling them,
    their scores and log-probabilities.
    """
    by_attempt: tuple[AttemptCost, ...] = ()
    made_by: str = ""
    """The run that made the outputs of a cached stage, where that is recorded."""
    useful_phases: tuple[PhaseCost, ...] = ()
    """The work that made the outputs, without repetitions and waste, of this run and of those it continues. Empty
    without outputs.
    """


@dataclass(frozen=True)
class Ledger:
    run_id: str
    state: str
    """completed, failed, stopped, over_budget, killed; without an `end` row running, or unfinished if nobody works at
    it; manual for stages started by hand.
    """
    started: float | None
    """Seconds since the epoch of the run's first row."""
    finished: float | None
    usd_per_device_hour: float
    """Price of the device that runs stages beside the pipeline; pools may have other prices."""
    stages: tuple[StageCost, ...]
    skipped_rows: int
    """Incomplete or invalid rows, which are missing from the sums."""
    outside_seconds: float = 0.0
    """Wall time of the run in which no stage ran: starting, between stages, report, sending results."""
    outside_usd: float = 0.0
    """Its price where prices.outside_stages says that it counts, else 0."""

    @property
    def total_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def device_seconds(self) -> float:
        return sum(stage.device_seconds for stage in self.stages)

    @property
    def total_usd(self) -> float:
        return sum(stage.usd for stage in self.stages) + self.outside_usd

    @property
    def waste_usd(self) -> float:
        return sum(stage.waste_usd for stage in self.stages)

    @property
    def saved_usd(self) -> float:
        return sum(stage.saved_usd for stage in self.stages)

    @property
    def taught_nothing_usd(self) -> float:
        return sum(stage.taught_nothing_usd for stage in self.stages)

    @property
    def made_usd(self) -> float:
        """Cost of making the run's outputs, including those of reused stages."""
        return self.total_usd + self.saved_usd

    def stage(self, name: str) -> StageCost | None:
        """The stage of that name, None if the run did not come to it."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def as_dict(self) -> dict[str, Any]:
        """What `rlhf report --json` prints: totals, then the stages and their phases."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "started": self.started,
            "finished": self.finished,
            "usd_per_device_hour": self.usd_per_device_hour,
            "total_seconds": self.total_seconds,
            "total_usd": self.total_usd,
            "outside_seconds": self.outside_seconds,
            "outside_usd": self.outside_usd,
            "waste_usd": self.waste_usd,
            "saved_usd": self.saved_usd,
            "taught_nothing_usd": self.taught_nothing_usd,
            "skipped_rows": self.skipped_rows,
            "stages": [asdict(stage) for stage in self.stages],
        }


def usd_per_win_rate_point(made_usd: float, win_rate: float | None) -> float | None:
    """Cost of each point of win rate above an even 50 %: made_usd / (100 (win_rate - 0.5)); None without a gain or a
    cost.
    """
    return made_usd / (100 * (win_rate - 0.5)) if win_rate is not None and win_rate > 0.5 and made_usd else None


def read_ledger(root: Path, params: Params, run_id: str | None = None) -> Ledger:
    """What the pipeline run `run_id` below `root` cost at the prices of `params`; without a run id, the newest
    pipeline run.

    If no pipeline run was ever recorded, or for run id `manual`: the newest attempt of every stage. Raises CostError
    if there is no such run, or nothing ran yet.
    """
    pipeline = jsonl.read(root / PIPELINE, PipelineRow)
    chosen = run_id or (pipeline.rows[-1].run_id if pipeline.rows else NO_RUN_ID)
    rows: list[PipelineRow] = [row for row in pipeline.rows if row.run_id == chosen]
    if not rows and chosen != NO_RUN_ID:
        run_ids = ", ".join(dict.fromkeys(row.run_id for row in reversed(pipeline.rows))) or "none"
        raise CostError(
            f"run {shown(chosen)} is not in {root / 'runs' / 'pipeline.jsonl'}. Name one of its runs "
            f"(newest first): {run_ids}."
        )
    stages, skipped = [], pipeline.skipped
    for name in dict.fromkeys([*STAGES, *(row.stage for row in rows if row.stage)]):
        attempts, cut = read_attempts(root / "runs" / name)
        skipped += cut
        row = next((row for row in reversed(rows) if row.event == "stage" and row.stage == name), None)
        placed: str | None = name if name in STAGES else None
        price = stage_price(params, placed)
        if rows:
            stage = _stage_of_run(name, chosen, row, attempts, price)
        else:
            stage = _cost(name, attempts[-1:], attempts, price) if attempts else None
        if stage is not None:
            paid = [attempt for attempt in attempts if attempt.run_id == chosen] if rows else attempts[-1:]
            nothing = taught_nothing(root / "runs" / name, paid, price) if name in LOOPS else 0.0
            stages.append(replace(stage, taught_nothing_usd=nothing))
    if not rows and not stages:
        raise CostError(f"no run was recorded in {root / 'runs'}, and the ledger needs one. Start one with: rlhf run")
    end = next((row for row in reversed(rows) if row.event == "end"), None)
    running = bool(rows) and end is None and run_at_work(root) == chosen
    if running:
        stages = [replace(stage, state=RUNNING) if stage.state == "unfinished" else stage for stage in stages]
    outside = outside_stages(rows, sum(stage.seconds for stage in stages))
    return Ledger(
        run_id=chosen,
        state=("manual" if not rows else end.state or "completed" if end else RUNNING if running else "unfinished"),
        started=rows[0].time if rows else None,
        finished=end.time if end else None,
        usd_per_device_hour=usd_per_device_hour(params),
        outside_seconds=outside,
        outside_usd=stage_price(params).usd(outside) if params.prices.outside_stages else 0.0,
        stages=tuple(stages),
        skipped_rows=skipped,
    )


def taught_nothing(folder: Path, attempts: Sequence[Attempt], price: StagePrice) -> float:
    """What the attempts paid for groups of responses without a difference: of each update their share of the phases in
    EQUAL_GROUPS.
    """
    rows = jsonl.read(folder / "metrics.jsonl", MetricRow).rows
    values = {(row.run_id, row.attempt, row.step): row.values for row in rows}
    return sum(
        values.get((row.run_id, row.attempt, row.step), {}).get(EQUAL_GROUPS[row.phase], 0.0)
        * price.usd_of_rows([row])
        for attempt in attempts
        for row in attempt.usage
        if row.phase in EQUAL_GROUPS
    )


def outside_stages(rows: Sequence[PipelineRow], stage_seconds: float) -> float:
    """Seconds of a run, from the start of its process to its last row, in which no stage ran; 0 without rows."""
    if not rows:
        return 0.0
    began = float(rows[0].detail.get(BEGAN, rows[0].time))
    return max(0.0, rows[-1].time - began - stage_seconds)


def _stage_of_run(
    name: str, run_id: str, row: PipelineRow | None, attempts: list[Attempt], price: StagePrice
) -> StageCost | None:
    run_attempts = [attempt for attempt in attempts if attempt.run_id == run_id]
    if run_attempts:
        return _cost(name, run_attempts, attempts, price)
    if row is None:
        return None
    makers = _makers(row.attempt, attempts) if row.cached and row.attempt is not None else []
    useful = [usage for attempt, later in makers for usage in split_usage(attempt, later)[0]]
    made_by = row.detail.get("made_by", {})
    return StageCost(
        stage=name,
        cached=row.cached,
        state="cached" if row.cached else row.state or "failed",
        message="",
        attempt=makers[-1][0].number if makers else row.attempt,
        attempts=0,
        failed_attempts=0,
        device=makers[-1][0].device if makers else "",
        world_size=makers[-1][0].world_size if makers else 1,
        usd_per_device_hour=price.usd_per_device_hour,
        seconds=0.0,
        device_seconds=0.0,
        rented=price.rented_devices,
        idle_usd=0.0,
        usd=0.0,
        waste_seconds=0.0,
        waste_usd=0.0,
        memory_retries=0,
        # the rows of a run elsewhere are not here: what it wrote of its cost is
        saved_seconds=_seconds(useful) if makers else made_by.get("seconds", 0.0),
        saved_usd=price.usd_of_rows(useful) if makers else made_by.get("usd", 0.0),
        peak_bytes=0,
        phases=(),
        made_by=made_by.get("run_id", ""),
        useful_phases=_phases(useful, price),
    )


def _makers(number: int, attempts: list[Attempt]) -> list[tuple[Attempt, list[Attempt]]]:
    """The attempts that made the outputs of attempt `number`, each with those after it."""
    done = [i for i, attempt in enumerate(attempts) if attempt.done and attempt.number == number]
    if not done:
        return []
    last = done[-1]
    first = last
    # an attempt that resumed after a done one reused its outputs
    while first > 0 and not (attempts[first - 1].done and attempts[first].resumed_step == 0):
        first -= 1
    chain = [i for i in range(first, last + 1) if attempts[i].may_share_checkpoints(attempts[last])]
    return [(attempts[i], attempts[i + 1 :]) for i in chain]


def _cost(name: str, run_attempts: list[Attempt], attempts: list[Attempt], price: StagePrice) -> StageCost:
    """Sums over `run_attempts`, the attempts of one run; `attempts` are all of the stage, which tell repeated work."""
    rows = [row for attempt in run_attempts for row in attempt.usage]
    redone = [
        row
        for i, attempt in enumerate(attempts)
        if attempt in run_attempts
        for row in split_usage(attempt, attempts[i + 1 :])[1]
    ]
    phases = _phases(rows, price)
    newest = run_attempts[-1]
    done = next((attempt.number for attempt in reversed(run_attempts) if attempt.done), None)
    makers = _makers(done, attempts) if done is not None else []
    return StageCost(
        stage=name,
        cached=False,
        state=newest.state,
        message=newest.message,
        attempt=done,
        attempts=len(run_attempts),
        failed_attempts=sum(not attempt.done for attempt in run_attempts),
        device=newest.device,
        world_size=newest.world_size,
        usd_per_device_hour=price.usd_per_device_hour,
        seconds=sum((phase.seconds for phase in phases), 0.0),
        device_seconds=_device_seconds(rows, price),
        rented=price.rented_devices,
        idle_usd=price.usd_of_rows(rows)
        - usd_of(_device_seconds(rows, price), price.usd_per_device_hour)
        - sum(row.usd for row in rows),
        usd=sum((phase.usd for phase in phases), 0.0),
        waste_seconds=_seconds(redone),
        waste_usd=price.usd_of_rows(redone),
        memory_retries=sum(len(attempt.retries) for attempt in run_attempts),
        saved_seconds=0.0,
        saved_usd=0.0,
        peak_bytes=max((phase.peak_bytes for phase in phases), default=0),
        phases=phases,
        by_attempt=tuple(
            AttemptCost(
                attempt.number,
                attempt.state,
                attempt.resumed_step,
                _seconds(attempt.usage),
                price.usd_of_rows(attempt.usage),
            )
            for attempt in run_attempts
        ),
        useful_phases=_phases([usage for attempt, later in makers for usage in split_usage(attempt, later)[0]], price),
    )


def _phases(rows: Sequence[UsageRow], price: StagePrice) -> tuple[PhaseCost, ...]:
    return tuple(
        _phase(phase, [row for row in rows if row.phase == phase], price)
        for phase in dict.fromkeys(row.phase for row in rows)
    )


def _phase(name: str, rows: list[UsageRow], price: StagePrice) -> PhaseCost:
    return PhaseCost(
        phase=name,
        seconds=_seconds(rows),
        tokens=sum(row.tokens for row in rows),
        sequences=sum(row.sequences for row in rows),
        usd=price.usd_of_rows(rows),
        peak_bytes=max(row.peak_bytes for row in rows),
    )


def _seconds(rows: Sequence[UsageRow]) -> float:
    return sum((row.seconds for row in rows), 0.0)


def _device_seconds(rows: Sequence[UsageRow], price: StagePrice) -> float:
    return sum((row.seconds * price.devices(row) for row in rows), 0.0)
