"""A typed row -> what the planner says of each of its measurements, in their units.

A row is planned from its run and from facts about its software; nothing is fitted to a row, and its id and source are
not read.
"""

import math
from dataclasses import dataclass, replace

from benchmarks.published import loops
from benchmarks.published.engines import facts
from benchmarks.published.row import LOOPS, Measured, Refused, Row
from benchmarks.published.settings import Planned, planned_of
from benchmarks.published.tensor_parallel import training_seconds
from costs.formulas.compute import micro_step
from costs.formulas.generation import generation, generation_moment
from costs.formulas.memory import Moment, device_bytes, frozen_role, peak
from costs.formulas.setting import Setting
from costs.planning.moments import moments
from costs.planning.phases import forward_phases, phases, step_seconds
from costs.tables.rates import EFFICIENCY, Efficiency

HOST_LAUNCH_SECONDS = 10e-6
"""A server's launch of one kernel that no graph holds."""


@dataclass(frozen=True)
class Case:
    """One printed number and what the formulas say it is, in the unit it is printed in."""

    id: str
    source: str
    tier: str
    quantity: str
    """memory, time, throughput or fits."""
    unit: str
    planned: float | bool
    measured: float | bool | None
    planning: Planned
    group: str
    """What it is comparable with: memory of training, time of decoding ..., see `group_of`."""
    fits: bool | None = None
    """Whether the whole of it is planned to fit on its device, where both are stated."""

    @property
    def error(self) -> float | None:
        """planned / measured - 1 of a number; 1 or 0 of a wrong or right `fits`."""
        if self.measured is None:
            return None
        if self.quantity == "fits":
            return float(self.planned != self.measured)
        return float(self.planned) / float(self.measured) - 1

    @property
    def factor(self) -> float:
        """Natural logarithm of planned over measured: of a throughput, of the time it stands for. Symmetric: a half
        and a double weigh the same.
        """
        if not self.measured or not self.planned or self.quantity == "fits":
            return 0.0
        result = math.log(float(self.planned) / float(self.measured))
        return -result if self.quantity == "throughput" else result


def cases(row: Row, rates: Efficiency = EFFICIENCY) -> list[Case]:
    """The comparisons of a row, its main number first. Raises CostError with what is missing."""
    return [_case(row, measured, rates) for measured in row.measured]


def _case(row: Row, measured: Measured, rates: Efficiency) -> Case:
    run = row.run.model_copy(update={"stage": "load"}) if measured.weights_only else row.run
    planning = planned_of(run, rates)
    return Case(
        id=row.id,
        source=row.source,
        tier=row.tier,
        quantity=measured.quantity,
        unit=measured.unit,
        planned=_planned(planning, measured),
        measured=measured.value,
        planning=planning,
        group=group_of(planning.setting, measured),
        fits=_fits(planning) if run.device is not None else None,
    )


def _planned(planning: Planned, measured: Measured) -> float | bool:
    """The planned number in the unit of the measured one. Raises Refused where what it takes is missing."""
    stated = planning.run.device is not None
    if measured.quantity == "fits":
        fits = _fits(planning)
        if fits is None or not stated:
            raise Refused("device or micro_batch is missing: whether it fits depends on it.")
        return fits
    if measured.quantity == "memory":
        return memory(planning, measured) / measured.scale
    if not stated:
        raise Refused("device is missing: time depends on it.")
    seconds = seconds_per_item(planning, measured)
    if measured.quantity == "time":
        return seconds * measured.items / measured.scale
    return 1 / seconds / measured.scale


def group_of(setting: Setting, measured: Measured) -> str:
    """The kind of number: rows of one group are checked by the same formulas."""
    what = "memory" if measured.quantity in ("memory", "fits") else "time"
    if measured.weights_only:
        return "memory of weights"
    if setting.stage in LOOPS:
        return f"{what} of a loop"
    if setting.stage == "serve":
        return f"{what} of " + ("prefill" if measured.per == "first_token" else "decoding")
    return f"{what} of training"


def memory(planning: Planned, measured: Measured) -> float:
    """Bytes of one device (or of all) as the source measured them."""
    setting = planning.setting
    if not planning.batch_stated and not measured.weights_only:
        raise Refused("micro_batch is not stated: memory of a training pass depends on it")
    if measured.weights_only:
        held = sum(frozen_role(setting, setting.model, setting.levers).values())
        return held + (setting.engine.context_bytes if measured.counts == "driver" else 0.0)
    held = peak_bytes = peak(moments(setting)).total
    if setting.stage == "serve":
        held = generation_moment(setting, setting.model, setting.levers).total
    elif measured.counts in ("reserved", "driver") or (
        facts(setting.engine).reports_reserved and measured.counts != "tensors"
    ):
        held = max(held, reserved(moments(setting))) + _other_lengths(planning)
        held = min(held, max(peak_bytes, setting.hardware.usable_bytes))
    if planning.run.ema:  # a further copy of the policy's weights
        held += setting.model.parameters * setting.levers.dtype_bytes
    if measured.counts == "driver":
        held += setting.engine.context_bytes
    devices = setting.gpus // layers_apart(setting) * _ways(planning)
    return held * (devices if measured.all_gpus else 1)


def layers_apart(setting: Setting) -> int:
    """Devices that share the layers of one model that generates, one after the other (Transformers' `device_map`)."""
    return setting.gpus if setting.stage == "serve" else 1


def _ways(planning: Planned) -> int:
    """Devices that share the model of one device of the setting."""
    return planning.run.tensor_parallel * planning.run.pipeline_parallel


def _other_lengths(planning: Planned) -> float:
    """Bytes of the blocks that rows of other lengths left: where lengths vary, logits of a new length do not fit into
    the blocks of the last, which the allocator keeps until the device is full.
    """
    if not planning.run.varied:
        return 0.0
    return max(moment.roles.get("policy", {}).get("logits", 0.0) for moment in moments(planning.setting))


def reserved(held: list[Moment]) -> float:
    """Bytes that the allocator ends up holding when no part's blocks serve another part: the sum of each part's own
    maximum.
    """
    parts = {(role, part) for moment in held for role, sizes in moment.roles.items() for part in sizes}
    return sum(max(moment.roles.get(role, {}).get(part, 0.0) for moment in held) for role, part in parts)


def _fits(planning: Planned) -> bool | None:
    """Whether it fits; None where that is not known. A server fits where one sequence does. Roles on their own devices
    hold different things, and which of them is the largest has no formula.
    """
    setting, run = planning.setting, planning.run
    if not planning.batch_stated or run.roles is not None:
        return None
    if facts(setting.engine).admits_by_cache and setting.stage == "serve":
        setting = setting.with_levers(micro_batch=1)
    need = device_bytes(setting, peak(moments(setting)).total / layers_apart(setting))
    return need <= setting.hardware.usable_bytes


def seconds_per_item(planning: Planned, measured: Measured) -> float:
    """Seconds for one printed item: token, sample, step, first token, FLOP, or the whole job."""
    setting, run = planning.setting, planning.run
    if setting.stage == "serve":
        return _generating_seconds(planning, measured)
    if setting.stage in LOOPS:
        return _loop_seconds(planning, measured)
    if measured.per in ("first_token", "input_token"):
        raise Refused(f"{measured.per} is not what stage {setting.stage} counts")
    devices = setting.gpus * _ways(planning)
    step = planning.bubble * step_seconds(setting).seconds / run.context_parallel
    if run.tensor_parallel > 1:
        step += setting.levers.accumulation * training_seconds(setting)
    # the reference of DPO reads every pair beside the policy
    step += sum(phase.seconds for phase in forward_phases(setting)) / setting.workload.steps
    sequences = setting.levers.micro_batch * setting.levers.accumulation * setting.gpus / run.context_parallel
    device_factor = devices if measured.each_gpu else 1
    if measured.per == "job":
        if not (run.train_tokens or run.steps or run.samples):
            raise Refused("tokens, steps or samples is not stated: a run's time depends on it")
        total = sum(phase.seconds for phase in phases(setting)) * planning.bubble
        return total * (devices if measured.all_gpus else 1)
    if measured.per == "flop":
        work = micro_step(
            setting, setting.model, setting.levers, setting.levers.micro_batch, setting.workload.mean_tokens
        )
        again = 0.75 if setting.levers.checkpointing == "full" else 1.0
        return step / (work.flops * again * setting.levers.accumulation)
    if measured.per == "sample":
        pairs = setting.stage in ("dpo", "reward")
        return step / (sequences / (2 if pairs else 1)) * device_factor
    if measured.per == "pair":
        return step / (sequences / 2) * device_factor
    if measured.per in ("token", "any_token"):
        return step / (sequences * setting.workload.mean_tokens) * device_factor
    if measured.per == "micro_step" and facts(setting.engine).iterates_micro_batches:
        once = replace(setting, levers=replace(setting.levers, accumulation=1))
        return step_seconds(once).seconds
    return step


def _generating_seconds(planning: Planned, measured: Measured) -> float:
    setting, run = planning.setting, planning.run
    work, batch = setting.workload, setting.levers.micro_batch
    # a server runs as many as its cache holds, at the length that they have on average
    side = loops.side_by_side(setting, float(batch))
    rows = generation(setting, setting.model, setting.levers, batch / side, side)
    first, total = rows[0][2], rows[0][2] + rows[1][2]
    device_factor = setting.gpus * run.tensor_parallel if measured.each_gpu else 1
    if measured.per == "first_token":
        engine = facts(setting.engine)
        launched = engine.prefill_launches * setting.model.layers * HOST_LAUNCH_SECONDS
        return first + launched
    if measured.per == "token":
        if measured.quantity == "time":
            return rows[1][2] / work.response_tokens
        return total / (work.response_tokens * batch) * device_factor
    if measured.per == "any_token":
        return total / ((work.response_tokens + work.prompt_tokens) * batch) * device_factor
    if measured.per == "input_token":
        return first / (work.prompt_tokens * batch) * device_factor
    if measured.per in ("sample"):
        return total / batch * device_factor
    if measured.per in ("job", "step"):
        return total
    raise Refused(f"{measured.per} is not what generation counts")


def _loop_seconds(planning: Planned, measured: Measured) -> float:
    setting, run = planning.setting, planning.run
    assert setting.rlhf is not None
    iteration = loops.iteration(planning).seconds
    device_factor = setting.gpus if measured.each_gpu else 1
    if measured.per == "job":
        if not (run.samples or run.steps):
            raise Refused("samples or steps is not stated: the time of a whole run depends on it")
        total = iteration * setting.workload.steps
        return total * (setting.gpus if measured.all_gpus else 1)
    if measured.per == "step":
        return iteration
    if measured.per in ("sample", "pair"):
        return iteration / setting.rlhf.batch * device_factor
    if measured.per in ("token", "any_token"):
        tokens = setting.workload.mean_tokens
        return iteration / (setting.rlhf.batch * tokens) * device_factor
    raise Refused(f"{measured.per} is not what a loop of {setting.stage} counts")
