"""Published measurements against the formulas: rows of a truth table -> estimates -> errors by
source.

A row is planned from the setting it prints (costs/published/printed.py, settings.py) and from facts
about its software; nothing is fitted to a row, and neither its id nor its title is read.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from config.errors import CostError
from costs.formulas.compute import micro_step
from costs.formulas.generation import generation, generation_moment
from costs.formulas.memory import Moment, device_bytes, frozen_role, peak
from costs.formulas.setting import Setting
from costs.planning.moments import moments
from costs.planning.phases import phases, step_seconds
from costs.published import loops
from costs.published.printed import Printed, read
from costs.published.settings import Planned, from_printed
from costs.published.units import Unit, derived, unit_of
from costs.published.words import Refused, not_stated
from costs.tables.rates import EFFICIENCY, Efficiency

HOST_LAUNCH_SECONDS = 10e-6
"""A server's launch of one kernel that no graph holds."""
LOOPS = ("ppo", "grpo", "rloo")


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
        """Natural logarithm of planned over measured: of a throughput, of the time it stands for.
        Symmetric: a half and a double weigh the same.
        """
        if not self.measured or not self.planned or self.quantity == "fits":
            return 0.0
        found = math.log(float(self.planned) / float(self.measured))
        return -found if self.quantity == "throughput" else found


def cases(row: Mapping[str, Any], efficiency: Efficiency = EFFICIENCY) -> list[Case]:
    """The comparisons that a row allows, its main number first. Raises CostError with every word
    that is not understood, or with what is missing.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("setting"), Mapping):
        raise Refused(["the row has no setting: a mapping of keys"])
    measured = row.get("measured") or {}
    if not isinstance(measured, Mapping) or not_stated(measured.get("unit")):
        raise Refused(["measured.unit is not stated: what is to be planned depends on it"])
    printed = str(measured["unit"])
    uses = row.get("use") or ()
    if row.get("kind") in ("price", "cost") or printed.lower().startswith("usd"):
        raise Refused([f"unit {printed!r}: a price, not a measurement"])
    value = measured.get("value")
    words: list[str] = []
    unit, said = None, None
    try:
        if derived(printed):
            raise Refused([f"unit {printed!r} is none of memory, time and throughput"])
        unit = unit_of(printed)
    except Refused as error:
        words += error.words
    try:
        said = read(row["setting"])
    except Refused as error:
        words += error.words
    if words or unit is None or said is None:
        raise Refused(words)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and plain and not 0 < value < math.inf:
        raise Refused([f"measured.value={value!r} must be a number above 0"])
    if "feasibility" in uses or (value is not None and not plain):
        unit, value = Unit("fits"), _fitted(value, unit, printed)
    found = [_case(row, said, unit, printed, value, efficiency)]
    also = measured.get("also")
    for name, other in also.items() if isinstance(also, Mapping) else ():
        if isinstance(other, bool) or not isinstance(other, int | float) or derived(str(name)):
            continue
        try:
            second = unit_of(str(name))
            if _comparable(second, unit, uses):
                found.append(_case(row, said, second, str(name), other, efficiency))
        except CostError:
            continue  # the main number alone is owed
    return found


def _comparable(unit: Unit, main: Unit, uses: Iterable[str]) -> bool:
    """Whether a second number is another quantity that the table uses."""
    if unit.item == "job" or unit.weights_only or unit.quantity == main.quantity:
        return False
    return not uses or unit.quantity in uses or (
        unit.quantity in ("time", "throughput") and not {"time", "throughput"}.isdisjoint(uses)
    )  # fmt: skip


def _fitted(value: Any, unit: Unit, printed: str) -> bool | None:
    """Whether what was measured did fit: `> 40` GB or OOM did not."""
    if isinstance(value, bool):
        return value
    if value is None:
        return None
    text = str(value).lower()
    if (
        text.startswith((">", "oom", "out of", "no", "does not", "fail"))
        or "oom" in printed.lower()
    ):
        return False
    if text.startswith(("fit", "yes", "ok", "runs")):
        return True
    raise Refused([f"measured.value={value!r} is neither a number nor a word for fits or OOM"])


def _case(
    row: Mapping[str, Any],
    said: Printed,
    unit: Unit,
    printed: str,
    value: Any,
    efficiency: Efficiency,
) -> Case:
    if unit.weights_only:
        said = replace(said, stage="load")
    planning = from_printed(said)
    setting = planning.setting
    if efficiency is not EFFICIENCY:
        planning = replace(planning, setting=replace(setting, efficiency=efficiency))
    planned = _planned(planning, unit)
    source = row.get("source")
    return Case(
        id=str(row.get("id")),
        source=str(source.get("title") if isinstance(source, Mapping) else source),
        tier=str(row.get("tier")),
        quantity=unit.quantity,
        unit=printed,
        planned=planned,
        measured=value if isinstance(value, int | float) else None,
        planning=planning,
        group=group_of(setting, unit),
        fits=_fits(planning) if said.device is not None else None,
    )


def _planned(planning: Planned, unit: Unit) -> float | bool:
    """The planned number in the printed unit. Raises Refused where what it takes is missing."""
    said = planning.printed
    if unit.quantity == "fits":
        fits = _fits(planning)
        if fits is None or said.device is None:
            raise Refused(["device or micro_batch is not stated: whether it fits depends on it"])
        return fits
    if unit.quantity == "memory":
        return memory(planning, unit) / unit.scale
    if said.device is None:
        raise Refused(["gpu is not stated: time depends on it"])
    seconds = seconds_per_item(planning, unit)
    return (
        seconds * unit.items / unit.scale if unit.quantity == "time" else 1 / seconds / unit.scale
    )


def group_of(setting: Setting, unit: Unit) -> str:
    """The kind of number: rows of one group are checked by the same formulas."""
    what = "memory" if unit.quantity in ("memory", "fits") else "time"
    if unit.weights_only:
        return "memory of weights"
    if setting.stage in LOOPS:
        return f"{what} of a loop"
    if setting.stage == "serve":
        return f"{what} of " + ("prefill" if unit.item == "first token" else "decoding")
    return f"{what} of training"


def memory(planning: Planned, unit: Unit) -> float:
    """Bytes of one device (or of all) as the source measured them."""
    setting = planning.setting
    if not planning.batch_stated and not unit.weights_only:
        raise Refused(["micro_batch is not stated: memory of a training pass depends on it"])
    if unit.weights_only:
        held = sum(frozen_role(setting, setting.model, setting.levers).values())
        return held + (setting.engine.context_bytes if unit.used else 0.0)
    each = each_ = peak(moments(setting)).total
    if setting.stage == "serve":
        each = generation_moment(setting, setting.model, setting.levers).total
    elif unit.reserved or (setting.engine.reports_reserved and not unit.allocated):
        each = max(each, reserved(moments(setting))) + _other_lengths(planning)
        each = min(each, max(each_, setting.hardware.usable_bytes))
    if planning.printed.ema:  # a further copy of the policy's weights
        each += setting.model.parameters * setting.levers.dtype_bytes
    if unit.used:
        each += setting.engine.context_bytes
    devices = setting.gpus // layers_apart(setting) * planning.printed.pipeline_parallel
    return each * (devices if unit.over_devices else 1)


def layers_apart(setting: Setting) -> int:
    """Devices that share the layers of one model that generates, one after the other (Transformers'
    `device_map`): all that tensor parallelism does not use.
    """
    return setting.gpus // setting.levers.tensor_parallel if setting.stage == "serve" else 1


CONSTANT = ("dummy", "synthetic", "random", "fake", "mock", "c4")
"""Data sets whose rows are all as long as a sequence."""


def _other_lengths(planning: Planned) -> float:
    """Bytes of the blocks that rows of other lengths left: where lengths vary, logits of a new
    length do not fit into the blocks of the last, which the allocator keeps until the device is
    full.
    """
    said = planning.printed
    if said.dataset is None or said.packed or said.dataset.lower().startswith(CONSTANT):
        return 0.0
    return max(
        moment.roles.get("policy", {}).get("logits", 0.0) for moment in moments(planning.setting)
    )


def reserved(held: list[Moment]) -> float:
    """Bytes that the allocator ends up holding when no part's blocks serve another part: the sum of
    each part's own maximum.
    """
    parts = {
        (role, part) for moment in held for role, sizes in moment.roles.items() for part in sizes
    }
    return sum(
        max(moment.roles.get(role, {}).get(part, 0.0) for moment in held) for role, part in parts
    )


def _fits(planning: Planned) -> bool | None:
    """Whether it fits; None where that is not known. A server fits where one sequence does. Roles
    on their own devices hold different things, and which of them is the largest has no formula.
    """
    setting, said = planning.setting, planning.printed
    if not planning.batch_stated or said.placement is not None or said.apart:
        return None
    if setting.engine.admits_by_cache and setting.stage == "serve":
        setting = setting.with_levers(micro_batch=1)
    need = device_bytes(setting, peak(moments(setting)).total / layers_apart(setting))
    return need <= setting.hardware.usable_bytes


def seconds_per_item(planning: Planned, unit: Unit) -> float:
    """Seconds for one printed item: token, sample, step, first token, FLOP, or the whole job."""
    setting, said = planning.setting, planning.printed
    if setting.stage == "serve":
        return _generating_seconds(planning, unit)
    if setting.stage in LOOPS:
        return _loop_seconds(planning, unit)
    if unit.item in ("request", "first token", "input"):
        raise Refused([f"a {unit.item} is not what stage {setting.stage} counts"])
    devices = setting.gpus * said.pipeline_parallel
    step = planning.bubble * step_seconds(setting).seconds / said.context_parallel
    sequences = (
        setting.levers.micro_batch
        * setting.levers.accumulation
        * setting.data_parallel
        / said.context_parallel
    )
    own = devices if unit.per_device else 1
    if unit.item == "job":
        if not (said.train_tokens or said.steps or said.samples):
            raise Refused(["tokens, steps or samples is not stated: a run's time depends on it"])
        total = sum(phase.seconds for phase in phases(setting)) * planning.bubble
        return total * (devices if unit.device_time else 1)
    if unit.item == "flop":
        work = micro_step(
            setting, setting.model, setting.levers, setting.levers.micro_batch,
            setting.workload.mean_tokens,
        )  # fmt: skip
        again = 0.75 if setting.levers.checkpointing == "full" else 1.0
        return step / (work.flops * again * setting.levers.accumulation)
    if unit.item == "sample":
        pairs = setting.stage in ("dpo", "reward")
        return step / (sequences / (2 if pairs else 1)) * own
    if unit.item == "pair":
        return step / (sequences / 2) * own
    if unit.item in ("token", "any token"):
        return step / (sequences * setting.workload.mean_tokens) * own
    if unit.iterates and setting.engine.iterates_micro_batches:
        once = replace(setting, levers=replace(setting.levers, accumulation=1))
        return step_seconds(once).seconds
    return step


def _generating_seconds(planning: Planned, unit: Unit) -> float:
    setting = planning.setting
    work, batch = setting.workload, setting.levers.micro_batch
    # a server has as many at work as its cache holds, at the length that they have on average
    side = loops.side_by_side(setting, float(batch))
    rows = generation(setting, setting.model, setting.levers, batch / side, side)
    first, total = rows[0][2], rows[0][2] + rows[1][2]
    own = setting.gpus if unit.per_device else 1
    if unit.item == "first token":
        engine = setting.engine
        launched = engine.prefill_launches * setting.model.layers * HOST_LAUNCH_SECONDS
        return first + launched
    if unit.item == "token":
        if unit.quantity == "time":
            return rows[1][2] / work.response_tokens
        return total / (work.response_tokens * batch) * own
    if unit.item == "any token":
        return total / ((work.response_tokens + work.prompt_tokens) * batch) * own
    if unit.item == "input":
        return first / (work.prompt_tokens * batch) * own
    if unit.item in ("request", "sample"):
        return total / batch * own
    if unit.item in ("job", "step"):
        return total
    raise Refused([f"a {unit.item} is not what generation counts"])


def _loop_seconds(planning: Planned, unit: Unit) -> float:
    setting, said = planning.setting, planning.printed
    assert setting.rlhf is not None
    iteration = loops.iteration(planning).seconds
    own = setting.gpus if unit.per_device else 1
    if unit.item == "job":
        if not (said.samples or said.steps):
            raise Refused(["samples or steps is not stated: the time of a whole run depends on it"])
        total = iteration * setting.workload.steps
        return total * (setting.gpus if unit.device_time else 1)
    if unit.item == "step":
        return iteration
    if unit.item in ("sample", "request", "pair"):
        return iteration / setting.rlhf.batch * own
    if unit.item in ("token", "any token"):
        tokens = setting.workload.mean_tokens
        return iteration / (setting.rlhf.batch * tokens) * own
    raise Refused([f"a {unit.item} is not what a loop of {setting.stage} counts"])


def feasibility(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """(row, whether we say that it does not fit) of the rows that ran out of memory."""
    found = []
    for row in rows:
        if "feasibility" in row.get("use", ()):
            try:
                first = cases(row)[0]
            except CostError:
                continue
            found.append((first.id, not first.planned))
    return found


# ---------------------------------------------------------------- errors


def weighted_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of |error| in which every source weighs the same, however many rows it has."""
    return signed_quantile(((source, abs(error)) for source, error in errors), fraction)


def signed_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of the errors as they are, every source weighing the same."""
    pairs = list(errors)
    rows: dict[str, int] = {}
    for source, _ in pairs:
        rows[source] = rows.get(source, 0) + 1
    ordered = sorted((error, 1 / rows[source]) for source, error in pairs)
    total, passed = sum(weight for _, weight in ordered), 0.0
    for error, weight in ordered:
        passed += weight
        if passed >= fraction * total - 1e-9:  # a sum of equal shares is not exact
            return error
    return float("nan")


def compare(
    rows: Iterable[Mapping[str, Any]], efficiency: Efficiency = EFFICIENCY
) -> tuple[list[Case], list[tuple[str, str]]]:
    """(comparisons, refused rows with their reasons) of a whole table."""
    found: list[Case] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            found.extend(cases(row, efficiency))
        except CostError as error:
            name = str(row.get("id")) if isinstance(row, Mapping) else repr(row)[:60]
            refused.append((name, str(error)))
    return found, refused


def summary(found: list[Case], group: str, tier: str = "A") -> dict[str, float]:
    """Median, 90th percentile and bias of the factor between plan and measurement of one group and
    tier, sources weighing the same; and the plain median. As fractions: 0.1 is 10% off.
    """
    errors = [
        (case.source, case.factor)
        for case in found
        if case.group == group and case.tier == tier and case.quantity != "fits" and case.measured
    ]
    return {
        "rows": float(len(errors)),
        "sources": float(len({source for source, _ in errors})),
        "median": math.expm1(weighted_quantile(errors, 0.5)),
        "p90": math.expm1(weighted_quantile(errors, 0.9)),
        "bias": math.expm1(signed_quantile(errors, 0.5)),
        "plain_median": math.expm1(median(abs(error) for _, error in errors))
        if errors
        else float("nan"),
    }
