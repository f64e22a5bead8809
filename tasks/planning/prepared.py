"""Prepares a run without running anything: its remaining cost, and what was spent already."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.atomic_file import write_atomically
from config.errors import CostError, ParamsError
from config.prerequisites import require_folders, require_judge, require_reward_function
from config.records import RESTART, STAGES, PipelineRow
from config.schema import Params
from config.vocabulary import require_students_vocabulary
from config.workspace.feedback import renew_snapshot
from config.workspace.kept import kept_params
from config.workspace.rows import pipeline_rows
from costs.ledger.attempts import read_attempts
from costs.ledger.budget import Cost, all_limits, chain, predecessor, spent, total
from costs.ledger.ledger import read_ledger
from costs.ledger.reconcile import PLAN_FILE
from costs.planning.planner import plan as make_plan
from costs.planning.plans import Plan, StagePlan
from costs.planning.target import Target, find_target
from costs.tables.price import stage_price
from tasks.dvc.origins import Origin
from tasks.dvc.reuse import fetch_records, reusable
from tasks.planning.placement_check import require_reachable
from tasks.planning.steps import planned_steps
from tasks.run.changed_code import ChangedCode, changed_since_checkpoint, left_aside, newest_checkpoint, policy


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Facts known before a run starts. `Planned` adds its cost, `Unplannable` the reason why there is none."""

    params: Params
    continues: str | None
    """The unfinished run that this one continues."""
    spent: Mapping[str, Cost]
    """Stage -> what that run, and those before it, spent."""


@dataclass(frozen=True, kw_only=True)
class Unplannable(Prepared):
    fault: str


@dataclass(frozen=True, kw_only=True)
class Planned(Prepared):
    target: Target
    plan: Plan
    ahead: Mapping[str, Cost]
    """Stage -> planned cost from here on, without unchanged stages."""
    origins: Mapping[str, Origin]
    """Stage -> the run that made it: of those that are not ahead."""
    fixed: Cost
    """The part of that which no lever changes: starting processes, reading data."""
    left_aside: tuple[str, ...]
    """Paid work of stopped stages that these params do not go on from, a line each."""
    changed: tuple[ChangedCode, ...]
    """Checkpoints that other code made. Where the policy is to start over, `ahead` counts that in."""

    @property
    def ahead_total(self) -> Cost:
        return total(self.ahead)


_KNOWN: ContextVar[Planned | Unplannable | None] = ContextVar("known", default=None)


@contextmanager
def known_plan(prepared: Planned | Unplannable | None) -> Iterator[None]:
    """Start the flow that is called in the block with this plan. A plan cannot be a parameter of a flow, because a
    form cannot hold it.
    """
    token = _KNOWN.set(prepared)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def planned_before() -> Planned | Unplannable | None:
    """The plan that the flow was called with."""
    return _KNOWN.get()


def prepare(
    root: Path, params: Params, decide: Callable[[Sequence[ChangedCode]], str] = lambda _: policy()
) -> Planned | Unplannable:
    """Plan the run that `params` ask for in the project at `root`.

    `decide` is asked what to do with the checkpoints that other code made, if there are any. Raises CostError if there
    is a budget or an approval threshold and no plan can be made; without one, `fault` says why there is none.
    Raises ParamsError if a stage is placed where a file that it reads is not, and ModelError for a student of another
    tokenizer than its teacher.
    """
    if params.data.feedback_source is not None:
        renew_snapshot(root)
    require_students_vocabulary(root, params)
    require_folders(root)
    require_judge(root, params)
    require_reward_function(root, params)
    rows = pipeline_rows(root)
    before = predecessor(rows, params, lambda run_id: _kept_params(root, run_id))
    so_far = spent_by_stage(root, params, chain(rows, before))
    facts = Prepared(params=params, continues=before, spent=so_far)
    try:
        target = find_target(params, None, None, None, root)
        plan = make_plan(params, target)
    except CostError as error:
        if all_limits(params.budget) or params.budget.approval_usd is not None:
            raise
        require_reachable(root, params, params.stages)
        return Unplannable(**vars(facts), fault=str(error))
    origins = reusable(root, params, params.stages)
    if len(origins) < len(params.stages):
        fetch_records(root)
        origins = reusable(root, params, params.stages)
    stale = [stage.stage for stage in plan.stages if stage.stage not in origins]
    require_reachable(root, params, stale)
    candidates = [changed_since_checkpoint(root, params, stage) for stage in stale if before]
    changed = tuple(change for change in candidates if change is not None)
    restarted = {change.stage for change in changed} if changed and decide(changed) == RESTART else set()
    shares = {stage: done_share(root, params, stage) if before and stage not in restarted else 0.0 for stage in stale}
    planned = {stage.stage: stage for stage in plan.stages if stage.stage in stale}
    return Planned(
        **vars(facts),
        target=target,
        plan=plan,
        ahead={name: _ahead(stage, shares[name]) for name, stage in planned.items()},
        origins=origins,
        fixed=total({name: _fixed(stage) for name, stage in planned.items()}),
        left_aside=tuple(filter(None, (left_aside(root, params, stage) for stage in stale if not before))),
        changed=changed,
    )


def _kept_params(root: Path, run_id: str) -> Params | None:
    """The params of a run, if it kept them and they are of today's schema."""
    try:
        return kept_params(root, run_id)
    except ParamsError:
        return None


def spent_by_stage(root: Path, params: Params, run_ids: list[str]) -> dict[str, Cost]:
    """What each stage of the named runs cost, at the prices of `params`, and the time outside of stages where that
    counts.
    """
    costs = {
        stage: spent(read_attempts(root / "runs" / stage)[0], run_ids, stage_price(params, stage)) for stage in STAGES
    }
    if params.prices.outside_stages:
        seconds = sum(read_ledger(root, params, run_id).outside_seconds for run_id in run_ids)
        costs["outside stages"] = Cost(stage_price(params).usd(seconds), 0.0)
    return costs


def spent_by_runs(root: Path, params: Params, rows: list[PipelineRow], run_id: str) -> dict[str, Cost]:
    """What each stage cost in a run and those that it goes on from."""
    return spent_by_stage(root, params, chain(rows, run_id))


def done_share(root: Path, params: Params, stage: str) -> float:
    """How much of the stage its newest checkpoint holds, from 0 to 1."""
    attempts, _ = read_attempts(root / "runs" / stage)
    steps = planned_steps(root, params, stage)
    if not attempts or not steps:
        return 0.0
    checkpoint = newest_checkpoint(root, stage, attempts)
    return min(1.0, checkpoint[1] / steps) if checkpoint else 0.0


def _ahead(stage: StagePlan, done: float) -> Cost:
    """The fixed part is paid again at every start, the rest as far as it is not done."""
    fixed = _fixed(stage)
    remaining = 1 - done
    return Cost(
        fixed.usd + (stage.usd.expected - fixed.usd) * remaining,
        fixed.seconds + (stage.seconds - fixed.seconds) * remaining,
    )


def _fixed(stage: StagePlan) -> Cost:
    parts = [phase for phase in stage.phases if phase.bound == "fixed"]
    return Cost(sum(phase.usd for phase in parts), sum(phase.seconds for phase in parts))


def keep(folder: Path, prepared: Prepared) -> None:
    """Write plan.json beside the run's params: the plan of every stage, what was spent before and what was still
    ahead.
    """
    if not isinstance(prepared, Planned):
        return
    record: dict[str, Any] = {
        **prepared.plan.as_json(),
        "time": time.time(),
        "hardware": prepared.target.hardware.name,
        "gpus": prepared.target.gpus,
        "usd_per_device_hour": prepared.target.price.expected,
        "continues": prepared.continues,
        "spent": {stage: cost._asdict() for stage, cost in prepared.spent.items()},
        "ahead": {stage: cost._asdict() for stage, cost in prepared.ahead.items()},
        "budget": prepared.params.budget.model_dump(mode="json"),
    }
    write_atomically(folder / PLAN_FILE, json.dumps(record, indent=1))
