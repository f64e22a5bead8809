"""The cheapest levers of a run that fit its devices.

Every combination is planned from complete params, so a search promises exactly the plan of the file it writes. Levers
that change the trained model (LoRA, 4-bit storage) are opt-in; the others change only memory, time and money.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any, Literal, get_args

from pydantic import BaseModel

from config.errors import CostError
from config.load import validate
from config.methods.registry import SAMPLING_METHODS
from config.records import LOOPS
from config.schema import Params
from config.sections.levers import Lora
from config.sections.where import can_be_divided
from costs.formulas.memory import device_bytes, peak
from costs.formulas.setting import Setting
from costs.planning.moments import moments
from costs.planning.phases import phases
from costs.planning.settings import settings
from costs.planning.target import Target
from costs.tables.catalogue import Price

Goal = Literal["usd", "time", "memory"]
GOALS: tuple[Goal, ...] = get_args(Goal)
LORA_RANK = 16
"""Rank of the adapters that are tried, on all matrices: that of recipes/demo-lora.yaml. A smaller one is hardly
cheaper.
"""
MOST_MICRO_BATCHES = 12


@dataclass(frozen=True)
class Limits:
    """Limits of the winner; None does not bind."""

    max_usd: float | None = None
    max_hours: float | None = None


@dataclass(frozen=True)
class Need:
    """What one stage needs."""

    setting: Setting
    seconds: float
    usd: float
    device_bytes: float

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.setting.hardware.usable_bytes


@dataclass(frozen=True)
class Choice:
    """A key of params changed by the search, and its effect alone."""

    key: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True)
class StageSearch:
    """What the search did for one stage."""

    start: Need
    best: Need
    tried: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Cheaper:
    """Params that train the same at less cost; with adapters, the same stages."""

    params: Params
    changes: tuple[str, ...]
    """`sft.micro_batch_size=16` ..., what differs."""
    by_stage: dict[str, StageSearch]


def evaluate(setting: Setting, price: Price) -> Need:
    """Time, money and memory of one stage by the formulas: what other levers took was not measured."""
    setting = replace(setting, hardware=replace(setting.hardware, timed=()))
    seconds = sum(phase.seconds for phase in phases(setting))
    usd = seconds * setting.paid_gpus / 3600 * price.expected
    return Need(setting, seconds, usd, device_bytes(setting, peak(moments(setting)).total))


def cheapest(params: Params, target: Target, stages: tuple[str, ...], goal: Goal, adapters: bool = False) -> Cheaper:
    """The best levers of `stages` for `goal` that fit the device; `adapters` adds LoRA and four bits.

    Raises CostError if no combination of a stage fits.
    """
    if goal not in GOALS:
        raise CostError(f"plan optimise {goal}: it is not one of {', '.join(GOALS)}.")
    storages: tuple[str | None, ...] = (params.model.quantisation,)
    if adapters and params.model.random is None:
        storages = ("nf4", None)
    candidates: list[tuple[Params, dict[str, int]]] = []
    refusal: CostError | None = None
    for quantisation in storages:
        model = params.model.model_copy(update={"quantisation": quantisation})
        try:
            stored = params.model_copy(update={"model": model})
            candidates.append(_with_storage(stored, target, stages, goal, adapters))
        except CostError as error:
            refusal = error
    if not candidates:
        assert refusal is not None
        raise refusal
    best, tried = min(reversed(candidates), key=lambda candidate: _total(candidate[0], target, stages, goal))
    if all(getattr(best.section(stage), "lora", None) is None for stage in tried):
        best = best.model_copy(update={"model": params.model})
    best = validate(best.model_dump(mode="json"), "the cheapest params")
    before, after = _needs(params, target), _needs(best, target)
    by_stage = {
        stage: StageSearch(before[stage], after[stage], count, _choices(params, best, target, stage, after[stage]))
        for stage, count in tried.items()
    }
    return Cheaper(best, _assignments(params, best), by_stage)


def _with_storage(
    params: Params, target: Target, stages: tuple[str, ...], goal: Goal, adapters: bool
) -> tuple[Params, dict[str, int]]:
    """(params with the best section of each stage, combinations tried of each), one stage after the other: later
    stages hold what earlier ones make.
    """
    counts = {}
    for stage in settings(params, target):
        if stage in stages:
            params, counts[stage] = _best_of_stage(params, target, stage, goal, adapters)
    return params, counts


def _best_of_stage(params: Params, target: Target, stage: str, goal: Goal, adapters: bool) -> tuple[Params, int]:
    start, price = params.section(stage), target.of(params, stage).price
    tried = [
        (changed, section, evaluate(settings(changed, target)[stage], price))
        for section in _sections(params, target, stage, adapters)
        for changed in (params.model_copy(update={stage: section}),)
    ]
    if not tried:
        raise CostError(
            f"model.quantisation={params.model.quantisation} goes with no levers of {stage} as "
            "where divides it. Set it to null, or where.STAGE.sharding: none."
        )
    fitting = [candidate for candidate in tried if candidate[2].fits]
    if not fitting:
        raise CostError(_none_fits([need for _, _, need in tried]))

    def order(candidate: tuple[Params, BaseModel, Need]) -> tuple[float, ...]:
        """The goal to within 1%, then the fewest changes, then memory, then time."""
        _, section, need = candidate
        main = log(max(_value(need, goal), 1e-12)) / 0.01
        return (round(main), len(_changed(start, section)), need.device_bytes, need.seconds)

    return min(fitting, key=order)[0], len(tried)


def _value(need: Need, goal: Goal) -> float:
    return {"usd": need.usd, "time": need.seconds, "memory": need.device_bytes}[goal]


def _needs(params: Params, target: Target) -> dict[str, Need]:
    return {
        stage: evaluate(setting, target.of(params, stage).price) for stage, setting in settings(params, target).items()
    }


def _total(params: Params, target: Target, stages: tuple[str, ...], goal: Goal) -> float:
    values = [_value(need, goal) for name, need in _needs(params, target).items() if name in stages]
    return max(values, default=0.0) if goal == "memory" else sum(values)


# ---------------------------------------------------------------- combinations


def _sections(params: Params, target: Target, stage: str, adapters: bool) -> Iterator[BaseModel]:
    """A stage's section with every combination of levers that trains the same, but for rounding; with `adapters` also
    LoRA.
    """
    section, setting = params.section(stage), settings(params, target)[stage]
    batches = list(_batch_keys(stage, setting, section))
    if stage == "evaluate":
        yield from (section.model_copy(update=batch) for batch in batches)
        return
    loras = [section.lora]
    if section.lora is None and adapters and _may_adapt(params, stage):
        loras.append(_new_adapter(params, stage, setting))
    sharding, storage = params.where.of(stage).sharding, params.model.quantisation
    optimizers = [optimizer for optimizer in ("adamw", "adamw8bit") if can_be_divided(sharding, optimizer, storage)]
    for batch, checkpointing, optimizer, lora in product(batches, (False, True), optimizers, loras):
        # over four bits a policy with full fine-tuning would start from other weights than its reference has
        if lora is None and storage and stage in SAMPLING_METHODS:
            continue
        levers = {"activation_checkpointing": checkpointing, "optimizer": optimizer, "lora": lora}
        yield section.model_copy(update=batch | levers)


def _batch_keys(stage: str, setting: Setting, section: Any) -> Iterator[dict[str, int]]:
    """The micro-batches that divide the sequences of a step on one device, and the one that is set, as keys of the
    section.
    """
    pair = 2 if setting.stage in ("reward", "dpo") else 1
    step = step_sequences(setting)
    sizes = [n for n in range(pair, step + 1) if step % n == 0 and n % pair == 0]
    key = "batch_size" if stage == "evaluate" else "micro_batch_size"
    if stage in LOOPS:
        key = "micro_batch_tokens"
    yield {key: getattr(section, key)}
    for size in sizes[-MOST_MICRO_BATCHES:]:
        if size != setting.levers.micro_batch:
            tokens = size * setting.workload.max_tokens
            yield {key: tokens if stage in LOOPS else size // pair}


def step_sequences(setting: Setting) -> int:
    """Sequences of an optimizer step on one device. A token budget may hold more than that."""
    if setting.stage in LOOPS and setting.rlhf is not None:
        return max(1, int(setting.rlhf.batch / setting.gpus / setting.rlhf.mini_batches))
    return setting.levers.micro_batch * setting.levers.accumulation


def _may_adapt(params: Params, stage: str) -> bool:
    """Whether a stage can learn an adapter: it starts from a model that has learnt, and what starts from it has an
    adapter like it.
    """
    if params.model.random is not None and (
        stage == "sft" or (stage == "reward" and "reward" not in params.start_from_sft)
    ):
        return False
    if stage == "distill":
        return params.section("distill").student.path is not None
    like = adapter_beside(params, stage)
    others = (params.section(copy).lora for copy in params.start_from_sft)
    return stage != "sft" or not any(
        other is not None and like is not None and other.difference(like) for other in others
    )


def adapter_beside(params: Params, stage: str) -> Lora | None:
    """The adapter that a new adapter of `stage` must equal: the SFT model's and those that start from it are copies of
    one.
    """
    related = ("sft", *params.start_from_sft)
    if stage not in related:
        return None
    adapters = (params.section(other).lora for other in related)
    return next((lora for lora in adapters if lora is not None), None)


def _new_adapter(params: Params, stage: str, setting: Setting) -> Lora:
    like = adapter_beside(params, stage)
    if like is not None:
        return like.model_copy(update={"dropout": 0.0})
    matrices = setting.model.matrices
    modules = [name for name in matrices if name != "router" and not name.startswith("shared_")]
    return Lora(rank=LORA_RANK, alpha=2.0 * LORA_RANK, modules=modules, dropout=0.0)


# ---------------------------------------------------------------- results


def _changed(before: BaseModel, after: BaseModel) -> dict[str, Any]:
    """The keys of a section that differ, with their new values."""
    return {name: value for name, value in after if getattr(before, name) != value}


def _choices(params: Params, best: Params, target: Target, stage: str, need: Need) -> tuple[Choice, ...]:
    """The effect of each changed key alone: the best params, which `need` so much, with that key put back."""
    before, after = params.section(stage), best.section(stage)
    price = target.of(best, stage).price
    choices = []
    for name, value in _changed(before, after).items():
        back: dict[str, Any] = {stage: after.model_copy(update={name: getattr(before, name)})}
        if name == "lora":
            back["model"] = params.model
        without = evaluate(settings(best.model_copy(update=back), target)[stage], price)
        choices.append(Choice(name, _plain(getattr(before, name)), _plain(value), _reason(without, need)))
    return tuple(choices)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _reason(without: Need, best: Need) -> str:
    memory = (best.device_bytes - without.device_bytes) / 2**30
    share = best.seconds / without.seconds - 1 if without.seconds else 0.0
    fits = "" if without.fits else "; without it the stage does not fit"
    return f"{memory:+.2f} GiB a device, {share:+.1%} time{fits}"


def _assignments(before: Params, after: Params) -> tuple[str, ...]:
    """The differences in the form of `--set`."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return tuple(
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section in new
        if isinstance(new[section], dict)
        for key, value in new[section].items()
        if old[section][key] != value
    )


def within_total(stages: list[StageSearch], limits: Limits) -> None:
    """Raise CostError if the stages together break a limit: what they need at the least, and what to raise."""
    usd, seconds = (sum(stage.best.usd for stage in stages), sum(stage.best.seconds for stage in stages))
    if limits.max_usd is not None and usd > limits.max_usd:
        raise CostError(
            f"the cheapest plan found costs {usd:.4g} USD, --max-usd {limits.max_usd:g} does not "
            "allow it. Raise it, or take another --hardware."
        )
    if limits.max_hours is not None and seconds > limits.max_hours * 3600:
        raise CostError(
            f"the plan found takes {seconds / 3600:.3g} h, --max-hours {limits.max_hours:g} does "
            "not allow it. Raise it, or take another --hardware or more --gpus."
        )


def _none_fits(tried: list[Need]) -> str:
    nearest = min(tried, key=lambda need: need.device_bytes)
    setting, gib = nearest.setting, 2**30
    return (
        f"none of {len(tried)} combinations of {setting.stage} fits {setting.gpus} x "
        f"{setting.hardware.name}: the smallest needs {nearest.device_bytes / gib:.1f} GiB a "
        f"device, it has {setting.hardware.usable_bytes / gib:.1f}. Take a larger device or more "
        "of them (--hardware, --gpus), or let it try LoRA (--adapters)."
    )
