"""The cheapest levers that fit: every combination is planned, the best one is explained against the
params as they are.

Levers that change what is learnt (LoRA, quantisation) are tried only when asked for; the others
change memory, time and money alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any, Literal

from config.errors import CostError
from config.records import LOOPS
from config.sections.levers import Lora
from costs.formulas.memory import device_bytes, peak
from costs.formulas.setting import Levers, Setting
from costs.planning.moments import moments
from costs.planning.phases import phases
from costs.planning.settings import adapter_of
from costs.tables.catalogue import Price

Goal = Literal["usd", "time", "memory"]
GOALS: tuple[Goal, ...] = ("usd", "time", "memory")


@dataclass(frozen=True)
class Limits:
    """What the winner must keep to; None does not bind."""

    max_usd: float | None = None
    max_hours: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One combination and what it needs."""

    setting: Setting
    seconds: float
    usd: float
    device_bytes: float

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.setting.hardware.usable_bytes

    def value(self, goal: Goal, start: Levers) -> tuple[float, ...]:
        """What is minimised: the goal to within 1%, then the fewest changed levers, then memory,
        then time.
        """
        main = {"usd": self.usd, "time": self.seconds, "memory": self.device_bytes}[goal]
        changes = sum(
            getattr(start, name) != getattr(self.setting.levers, name)
            for name in Levers.__dataclass_fields__
            if name != "accumulation"
        )
        return (round(log(max(main, 1e-12)) / 0.01), changes, self.device_bytes, self.seconds)


@dataclass(frozen=True)
class Choice:
    """One lever of the winner that differs from the start, and what it alone changes."""

    lever: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    start: Candidate
    best: Candidate
    tried: int
    choices: tuple[Choice, ...]


LORA_RANK = 16
"""Rank of the adapters that are tried, on all matrices: that of recipes/demo-lora.yaml. A smaller
one costs hardly less.
"""


def micro_batches(setting: Setting) -> list[int]:
    """Micro-batches that divide the sequences of a step on one device, and the one that is set."""
    whole, own = step_sequences(setting), setting.levers.micro_batch
    least = 2 if setting.stage in ("reward", "dpo") else 1  # a pair stays together
    sizes = [size for size in range(least, whole + 1) if whole % size == 0 and size % least == 0][
        -12:
    ]
    return sizes if own in sizes else [*sizes, own]


def step_sequences(setting: Setting) -> int:
    """Sequences of an optimizer step on one device. A token budget may hold more than that."""
    if setting.stage in LOOPS and setting.rlhf is not None:
        return max(1, int(setting.rlhf.batch / setting.data_parallel / setting.rlhf.mini_batches))
    return setting.levers.micro_batch * setting.levers.accumulation


def with_combination(setting: Setting, levers: Levers) -> Setting:
    """`setting` with these levers; another micro-batch takes the place of its budget of tokens."""
    changed = levers.micro_batch != setting.levers.micro_batch
    return replace(
        setting.with_levers(micro_batch=levers.micro_batch) if changed else setting, levers=levers
    )


def combinations(
    setting: Setting, adapters: bool = False, free: bool = True, like: Lora | None = None
) -> Iterator[Levers]:
    """Every combination of levers that gives the same training, but for rounding; with `adapters`
    also LoRA and QLoRA, with the rank and the matrices of `like`.

    `free` False keeps what params.yaml can not say (sharding, offloading, paged optimizers, double
    quantisation) as it is.
    """
    levers, shared = setting.levers, setting.gpus > 1
    whole = step_sequences(setting)
    stores = ("nf4", "nf4-dq") if free else ("nf4",)
    modules = tuple(
        name
        for name in setting.model.matrices
        if name != "router" and not name.startswith("shared_")
    )
    tunings: list[dict[str, Any]] = [{}]
    if adapters and levers.tuning == "full":
        lora = {
            "tuning": "lora",
            "lora_rank": LORA_RANK,
            "lora_modules": modules,
            "weights_fp32": False,
        } | adapter_of(like)
        tunings += [lora | {"quantisation": quant} for quant in (None, *stores)]
    if adapters and levers.tuning == "lora":
        tunings += [
            {"quantisation": quant} for quant in (None, *stores) if quant != levers.quantisation
        ]
    parallels = ("ddp", "zero2", "zero3", "fsdp") if shared and free else (levers.parallel,)
    optimizers = (
        ("adamw", "adamw8bit", *(("paged_adamw8bit",) if free else ()))
        if levers.tuning != "frozen"
        else (levers.optimizer,)
    )
    attentions = ("flash", "sdpa") if free and not setting.hardware.is_cpu else (levers.attention,)
    checkpointings = ("none", "selective", "full") if levers.tuning != "frozen" else ("none",)
    offloads = (False, True) if free else (levers.offload_optimizer,)
    axes = product(
        micro_batches(setting), checkpointings, attentions, optimizers, parallels, offloads, tunings
    )
    for micro, checkpointing, attention, optimizer, parallel, offload, tuning in axes:
        if checkpointing == "selective" and (levers.attention != "eager" or not free):
            continue  # only worth its name where the scores are kept
        if offload and optimizer.startswith("paged"):
            continue
        yield replace(
            levers,
            micro_batch=micro,
            accumulation=max(1, whole // micro),
            checkpointing=checkpointing,
            attention=attention,
            optimizer=optimizer,
            parallel=parallel,
            offload_optimizer=offload,
            **tuning,
        )


def evaluate(setting: Setting, price: Price) -> Candidate:
    """Time, money and memory of one combination."""
    seconds = sum(phase.seconds for phase in phases(setting))
    usd = seconds * setting.paid_gpus / 3600 * price.expected
    return Candidate(setting, seconds, usd, device_bytes(setting, peak(moments(setting)).total))


def search(
    setting: Setting,
    price: Price,
    goal: Goal,
    limits: Limits | None = None,
    adapters: bool = False,
    free: bool = True,
    allowed: Callable[[Levers], bool] = lambda _: True,
    like: Lora | None = None,
) -> Found:
    """The best of the `allowed` combinations for `goal` that fits the device and the limits; `like`
    as in `combinations`.

    Raises CostError where none does, with the nearest: what it needs and what there is.
    """
    if goal not in GOALS:
        raise CostError(f"--optimise {goal} is not one of {', '.join(GOALS)}.")
    bounds = limits or Limits()
    start = evaluate(setting, price)
    tried, best, nearest = 0, None, start
    for levers in filter(allowed, combinations(setting, adapters, free, like)):
        candidate = evaluate(with_combination(setting, levers), price)
        tried += 1
        nearest = min(nearest, candidate, key=lambda c: c.device_bytes)
        if (
            candidate.fits
            and _within(candidate, bounds)
            and (
                best is None
                or candidate.value(goal, setting.levers) < best.value(goal, setting.levers)
            )
        ):
            best = candidate
    if best is None:
        raise CostError(_none_fits(setting, nearest, bounds, tried))
    return Found(start, best, tried, explain(start, best, price))


def _within(candidate: Candidate, limits: Limits) -> bool:
    return (limits.max_usd is None or candidate.usd <= limits.max_usd) and (
        limits.max_hours is None or candidate.seconds / 3600 <= limits.max_hours
    )


def within_total(found: list[Found], limits: Limits) -> None:
    """Raise CostError if the stages together break a limit: what they need at the least, and what
    to raise.
    """
    usd, seconds = sum(each.best.usd for each in found), sum(each.best.seconds for each in found)
    if limits.max_usd is not None and usd > limits.max_usd:
        raise CostError(
            f"the cheapest plan found costs {usd:.4g} USD, --max-usd {limits.max_usd:g} does not "
            "allow it. "
            "Raise it, or take another --hardware."
        )
    if limits.max_hours is not None and seconds > limits.max_hours * 3600:
        raise CostError(
            f"the plan found takes {seconds / 3600:.3g} h, --max-hours {limits.max_hours:g} does "
            "not allow it. "
            "Raise it, or take another --hardware or more --gpus."
        )


def _none_fits(setting: Setting, nearest: Candidate, limits: Limits, tried: int) -> str:
    needed, there = nearest.device_bytes / 2**30, setting.hardware.usable_bytes / 2**30
    if not nearest.fits:
        return (
            f"none of {tried} combinations of {setting.stage} fits {setting.gpus} x "
            f"{setting.hardware.name}: "
            f"the smallest needs {needed:.1f} GiB a device, it has {there:.1f}. "
            "Take a larger device or more of them (--hardware, --gpus), or let it try LoRA "
            "(--adapters)."
        )
    return (
        f"none of {tried} combinations of {setting.stage} keeps to max_usd={limits.max_usd} and "
        f"max_hours={limits.max_hours}: "
        f"one that fits the memory costs {nearest.usd:.2f} USD and {nearest.seconds / 3600:.2f} h. "
        "Raise --max-usd or --max-hours."
    )


def explain(start: Candidate, best: Candidate, price: Price) -> tuple[Choice, ...]:
    """What each changed lever does by itself: the winner with that lever put back, beside the
    winner.
    """
    changed = [
        name
        for name in Levers.__dataclass_fields__
        if getattr(start.setting.levers, name) != getattr(best.setting.levers, name)
    ]
    adapter = ("tuning", "lora_rank", "lora_modules", "weights_fp32") if "tuning" in changed else ()
    found = []
    for name in changed:
        if name == "accumulation" or (name != "tuning" and name in adapter):
            continue  # follows from the micro-batch, or from LoRA
        before, after = getattr(start.setting.levers, name), getattr(best.setting.levers, name)
        changes: dict[str, Any] = {name: before}
        if name == "tuning":
            changes |= {
                other: getattr(start.setting.levers, other) for other in (*adapter, "quantisation")
            }
        if name == "micro_batch":
            changes["accumulation"] = start.setting.levers.accumulation
        without = evaluate(best.setting.with_levers(**changes), price)
        found.append(Choice(name, before, after, _reason(without, best)))
    return tuple(found)


def _reason(without: Candidate, best: Candidate) -> str:
    memory = (best.device_bytes - without.device_bytes) / 2**30
    share = best.seconds / without.seconds - 1 if without.seconds else 0.0
    fits = "" if without.fits else "; without it the stage does not fit"
    return f"{memory:+.2f} GiB a device, {share:+.1%} time{fits}"


def section_changes(stage: str, best: Candidate) -> dict[str, Any]:
    """The winner as keys of the stage's section of params.yaml; `lora` only where the section may
    have none yet.
    """
    levers, pairs = best.setting.levers, 2 if stage in ("reward", "dpo") else 1
    if stage == "evaluate":
        return {"batch_size": levers.micro_batch}
    changes: dict[str, Any] = {
        "activation_checkpointing": levers.checkpointing == "full",
        "optimizer": levers.optimizer,
    }
    if levers.tuning == "lora":
        changes["lora"] = {
            "rank": levers.lora_rank,
            "alpha": 2.0 * levers.lora_rank,
            "modules": list(levers.lora_modules),
            "dropout": 0.0,
        }
    if stage in LOOPS:
        return changes | {"micro_batch_tokens": int(best.setting.micro_batch_tokens)}
    return changes | {"micro_batch_size": max(1, levers.micro_batch // pairs)}
