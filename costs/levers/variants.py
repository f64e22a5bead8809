"""The variants of a comparison: the params as they are, and each lever that makes their alignment
cheaper, one at a time and in a few combinations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from config.compose import compose, flat
from config.errors import ParamsError
from config.load import validate
from config.methods.registry import METHODS, RECORDS, SAMPLING_METHODS
from config.schema import Params
from config.sections.online import Online
from costs.planning.search import LORA_RANK, adapter_beside

BASELINE, OPTIMISED = "baseline", "optimised"
RATE_FACTORS = (3.0, 10.0, 30.0)
"""Learning rates tried for adapters, relative to full fine-tuning: LoRA learns best at about ten
times. Source: Schulman et al. 2025, LoRA Without Regret.
"""
ADAPTER_RATE = 10.0
"""The one used if none was tried."""
REWARD_ADAPTER_RATE = 3.0
"""Of a reward model's adapter: its scores saturate at a lower rate than a policy's."""
BEST_OF = 16
PIECES = 4
"""Of a micro-batch, with accumulation."""
MODULES = ("q", "k", "v", "o", "gate", "up", "down")
ONE_LAYER = "the model has one layer, and no half of them"
HARDWARE_WITH_ALL = "a100-80"
"""The device that levers are planned for where this machine lacks them."""


@dataclass(frozen=True)
class Device:
    """Numeric types that this machine can compute with."""

    gpu: bool
    bf16: bool
    """Its products in bf16 are not emulated."""


@dataclass(frozen=True)
class Variant:
    """One way to align, as complete params."""

    name: str
    params: Params
    changes: Mapping[str, Any]
    """Dotted key -> value, where it differs from the baseline."""
    missing: str = ""
    """Why it cannot run here; empty if it can."""
    best_of: int = 0
    """Replies of the SFT model of which the best is taken, instead of training; 0 trains."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Every stage that makes its model, in order."""
        method = () if self.best_of else (self.params.align.method,)
        student = ("distill",) if self.params.tracking.model == "student" else ()
        needed = ("data", "sft") if method == ("dpo",) else ("data", "sft", "reward")
        return (*needed, *method, *student)

    def params_of(self, stage: str, baseline: Params) -> Params:
        """The params that a stage is made with: the baseline's, so that variants share it, unless
        it is one of `own_stages`, or the variant changes its section.
        """
        touched = any(key.startswith(f"{stage}.") for key in self.changes)
        return self.params if touched or stage in self.own_stages else baseline

    @property
    def own_stages(self) -> tuple[str, ...]:
        """Those whose cost is the cost of aligning: the method, and a student."""
        return tuple(stage for stage in self.stages if stage in (*METHODS, "distill"))


def variants(
    params: Params,
    device: Device,
    layers: int,
    optimised: Params | None = None,
    rate: float = ADAPTER_RATE,
) -> list[Variant]:
    """The baseline first, then every lever that applies to `params`; what changes nothing, or
    contradicts the rest of params, is left out or has the reason in `missing`.

    `layers` are the base model's, `optimised` the params that the planner would choose; `rate`
    multiplies the learning rates of adapters.
    """
    content = params.model_dump(mode="json") | {"distill": None}
    content["tracking"] = content["tracking"] | {"model": "aligned"}
    baseline = Variant(BASELINE, validate(content, BASELINE), {})
    found = [baseline]
    if optimised is not None:
        content = optimised.model_dump(mode="json") | {"distill": None}
        content["tracking"] = content["tracking"] | {"model": "aligned"}
        found.append(_variant(OPTIMISED, baseline, validate(content, OPTIMISED)))
    for name, overlay, missing in _levers(params, device, layers, rate):
        own = params.tracking.model == "student" or name == "student"
        changed = compose(baseline.params.model_dump(mode="json"), overlay)
        if name != "student" and own:
            changed["distill"] = None
        try:
            made = validate(changed, name)
        except ParamsError as error:
            found.append(Variant(name, baseline.params, {}, missing or str(error)))
            continue
        found.append(_variant(name, baseline, made, missing))
    found.append(Variant(f"best-of-{BEST_OF}", baseline.params, {}, best_of=BEST_OF))
    return _distinct(found)


def _distinct(found: list[Variant]) -> list[Variant]:
    """Drop variants equal to an earlier one."""
    kept: list[Variant] = []
    for each in found:
        trained = not each.missing and not each.best_of
        if not trained or all(each.params != other.params for other in kept if not other.missing):
            kept.append(each)
    return kept


def _variant(name: str, baseline: Variant, params: Params, missing: str = "") -> Variant:
    before = dict(flat(baseline.params.model_dump(mode="json")))
    after = dict(flat(params.model_dump(mode="json")))
    changes = {key: value for key, value in after.items() if before.get(key, ...) != value}
    return Variant(name, params, changes, missing)


Overlay = dict[str, Any]


def _levers(
    params: Params, device: Device, layers: int, rate: float
) -> Iterator[tuple[str, Overlay, str]]:
    """Name, overlay, and why it cannot run here."""
    method = params.align.method
    section = params.section(method)
    adapter = _adapter(params, rate)
    yield from _precisions(params, device)
    if section.lora is None:
        yield "lora", adapter, ""
        quantised = compose(adapter, {"model": {"quantisation": "nf4"}})
        random = "a base built from model.random is never quantised"
        yield "qlora", quantised, random if params.model.random is not None else ""
    else:
        rates = _rates(params, 1 / rate)
        separate = {"layout": "separate"} if RECORDS[method].has_critic else {}
        yield "full", {method: {"lora": None, **rates, **separate}}, ""
    yield "8bit-adamw", {method: {"optimizer": "adamw8bit"}}, ""
    yield "accumulation", {method: _smaller_pieces(params)}, ""
    recompute = not section.activation_checkpointing
    yield "checkpointing", {method: {"activation_checkpointing": recompute}}, ""
    if RECORDS[method].has_critic:
        yield "shared-trunk", {method: {"layout": "shared_trunk"}}, ""
        if section.lora is None:
            yield "shared-base", _shared_base(params, adapter), ""
        if params.reward.lora is None:
            smaller = {"reward": {"layers": -(-layers // 2)}} if layers > 1 else {}
            yield "small-reward", smaller, "" if layers > 1 else ONE_LAYER
    for other in METHODS:
        if other != method:
            there = getattr(params, other) is not None
            missing = "" if there else f"params.yaml has no section {other}"
            yield other, {"align": {"method": other}} if there else {}, missing
    for name, sharding in (("ddp-2", "none"), ("zero2-2", "zero2"), ("fsdp2-2", "zero3")):
        yield name, {"where": {method: {"processes": 2, "sharding": sharding}}}, ""
    if method in SAMPLING_METHODS:
        yield "fewer-passes", {method: _fewer_passes(section)}, ""
        yield "fewer-updates", {method: _fewer_updates(section)}, ""
        student = _student(params, layers)
        yield "student", student or {}, "" if student else ONE_LAYER
        if RECORDS[method].has_critic:
            trunk = {"layout": "shared_trunk"}
            yield "trunk+fewer-passes", {method: {**trunk, **_fewer_passes(section)}}, ""
            yield "trunk+fewer-updates", {method: {**trunk, **_fewer_updates(section)}}, ""
        if method != "rloo" and (rloo := getattr(params, "rloo", None)) is not None:
            fewer = {"align": {"method": "rloo"}, "rloo": _fewer_updates(rloo)}
            yield "rloo+fewer-updates", fewer, ""
        if section.lora is None:
            small = compose(adapter, {method: {"optimizer": "adamw8bit"}})
            yield "lora+8bit-adamw", small, ""


def _fewer_passes(section: Online) -> dict[str, int]:
    """Half of the passes over each rollout."""
    return {f"{section.method}_epochs": max(1, section.epochs // 2)}


def _fewer_updates(section: Online) -> dict[str, int]:
    """Two thirds of the updates; the learning rate falls as fast."""
    return {"updates": max(1, 2 * section.updates // 3)}


def _precisions(params: Params, device: Device) -> Iterator[tuple[str, Overlay, str]]:
    emulated = "this processor emulates products in {}, which takes many times as long"
    lacks = {"fp32": True, "bf16": device.gpu or device.bf16, "fp16": device.gpu}
    for dtype, there in lacks.items():
        if dtype != params.model.dtype:
            yield dtype, {"model": {"dtype": dtype}}, "" if there else emulated.format(dtype)


def _adapter(params: Params, rate: float) -> Overlay:
    method = params.align.method
    return {method: {"lora": _lora(params), **_rates(params, rate)}}


def _lora(params: Params) -> dict[str, Any]:
    """An adapter like those of the models that it starts from."""
    like = adapter_beside(params, params.align.method)
    if like is not None:
        return like.model_dump(mode="json") | {"dropout": 0.0}
    return {
        "rank": LORA_RANK, "alpha": 2.0 * LORA_RANK, "modules": list(MODULES), "dropout": 0.0
    }  # fmt: skip


def _rates(params: Params, factor: float) -> dict[str, float]:
    """The learning rates of the method, each times `factor`."""
    section = params.section(params.align.method)
    names = ("learning_rate", "value_learning_rate")
    return {name: getattr(section, name) * factor for name in names if hasattr(section, name)}


def _shared_base(params: Params, adapter: Overlay) -> Overlay:
    """One frozen base: the reward model is an adapter on it too."""
    rate = params.reward.learning_rate * REWARD_ADAPTER_RATE
    reward = (
        {} if params.reward.lora else {"reward": {"lora": _lora(params), "learning_rate": rate}}
    )
    return compose(compose(adapter, {"ppo": {"layout": "shared_base"}}), reward)


def _smaller_pieces(params: Params) -> dict[str, int]:
    """The same optimizer step from pieces of a quarter of the size."""
    section = params.section(params.align.method)
    if params.align.method in SAMPLING_METHODS:
        least = params.model.context_length
        return {"micro_batch_tokens": max(least, section.micro_batch_tokens // PIECES)}
    return {"micro_batch_size": max(1, section.micro_batch_size // PIECES)}


def _student(params: Params, layers: int) -> Overlay | None:
    """The section distill of the params, or half of the aligned model's layers; None for a model
    that has no half.
    """
    served = {"tracking": {"model": "student"}}
    if params.distill is not None:
        return {"distill": params.distill.model_dump(mode="json"), **served}
    if layers < 2:
        return None
    loop = params.section(params.align.method).model_dump(mode="json")
    shared = (
        "optimizer", "activation_checkpointing", "updates", "batch_size", "max_new_tokens",
        "temperature", "rollout_batch_size", "rollout_engine", "num_mini_batches",
        "micro_batch_tokens", "max_grad_norm", "schedule", "checkpoint_every_updates",
        "sample_every_updates",
    )  # fmt: skip
    origin = {"path": None, "revision": None, "random": None, "layers": -(-layers // 2)}
    distill = {name: loop[name] for name in shared} | {
        "student": origin, "lora": None, "responses_per_prompt": 1, "sft_updates": 0,
        "lmbda": 0.0, "beta": 0.0, "distill_epochs": 2,
        "learning_rate": 10 * loop["learning_rate"],
    }  # fmt: skip
    return {"distill": distill, **served}
