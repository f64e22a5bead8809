"""Published measurements against the formulas: rows of a truth table -> predictions -> errors by
source.

A row is predicted from the setting it prints (costs/published/printed.py) and from facts about its
software; nothing is fitted to a row.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from config.errors import CostError
from costs.formulas.compute import micro_step
from costs.formulas.generation import generation, generation_moment
from costs.formulas.memory import Moment, device_bytes, peak
from costs.formulas.setting import Setting
from costs.planning.stages import moments, phases, step_seconds
from costs.published.printed import setting_of
from costs.tables.rates import EFFICIENCY, Efficiency

GIB, GB, MIB = 2**30, 1e9, 2**20


SECONDS = {
    "seconds per step": 1.0,
    "s/step": 1.0,
    "seconds/step": 1.0,
    "ms per step": 1e-3,
    "ms/step": 1e-3,
    "s/it": 1.0,
    "s/iteration": 1.0,
}
"""Units of a measured optimizer step."""


@dataclass(frozen=True)
class Case:
    """One printed number and what we say it is."""

    id: str
    source: str
    tier: str
    quantity: str
    """memory, or time (throughputs are compared as seconds per unit of work)."""
    measured: float
    predicted: float
    detail: str

    @property
    def error(self) -> float:
        """Relative error of the prediction; of a throughput, of the time it stands for."""
        return self.predicted / self.measured - 1


def cases(row: Mapping[str, Any], efficiency: Efficiency = EFFICIENCY) -> list[Case]:
    """The comparisons that a row allows. Raises CostError with the reason where its setting is
    incomplete.
    """
    if row["kind"] == "price":
        raise CostError("a price, not a measurement")
    setting, measured = replace(setting_of(row), efficiency=efficiency), row["measured"]
    found: list[Case] = []
    for value, unit in [
        (measured["value"], str(measured["unit"])),
        *((v, k) for k, v in measured.get("also", {}).items()),
    ]:
        case = (
            _case(row, setting, value, unit)
            if "tflop" not in unit or value == measured["value"]
            else None
        )
        if case:
            found.append(case)
    return found


def _case(row: Mapping[str, Any], setting: Setting, value: Any, unit: str) -> Case | None:
    def make(quantity: str, predicted: float, measured: float, detail: str = "") -> Case:
        return Case(
            row["id"], row["source"]["title"], row["tier"], quantity, measured, predicted, detail
        )

    if isinstance(value, str) or "kernels" in unit:
        # "> 40 GB" says only that it does not fit, see `feasibility`; the bare context is an input
        # of ours
        return None
    lowered = unit.lower()
    if re.match(r"(gib|gb|mb|max_gpu_ram_gb)", lowered):
        scale = GIB if lowered.startswith("gib") else MIB if lowered.startswith("mb") else GB
        predicted, detail = memory(setting, lowered)
        return make("memory", predicted, value * scale, detail)
    if lowered.startswith("tokens") or lowered.startswith("samples"):
        return make("time", seconds_per_unit(setting, lowered), 1 / value)
    if lowered.startswith("minutes_per_1000"):
        once = step_seconds(replace(setting, levers=replace(setting.levers, accumulation=1)))
        return make("time", once.seconds, value * 60 / 1000)
    if "tflop" in lowered and "mfu" not in lowered:  # achieved by one device, recomputation counted
        step = micro_step(
            setting,
            setting.model,
            setting.levers,
            setting.levers.micro_batch,
            setting.workload.mean_tokens,
        )
        return make(
            "time",
            step_seconds(setting).seconds / (step.flops * setting.levers.accumulation),
            1 / (value * 1e12),
        )
    if lowered in SECONDS:
        return make("time", step_seconds(setting).seconds, value * SECONDS[lowered])
    if lowered in ("hours", "gpu-hours"):
        total = sum(phase.seconds for phase in phases(setting)) / 3600
        return make("time", total * (setting.gpus if lowered == "gpu-hours" else 1), value)
    return None  # utilisations follow from the throughput, other units are not ours


def memory(setting: Setting, unit: str) -> tuple[float, str]:
    """Bytes of one device as the source measured them, and the moment of the peak."""
    if "model load" in unit:
        return (
            setting.engine.context_bytes + setting.model.parameters * setting.levers.weight_bytes,
            "weights",
        )
    if setting.stage == "serve":
        held = generation_moment(setting, setting.model, setting.levers)
        return held.total, held.phase
    held_moments = moments(setting)
    highest = peak(held_moments)
    if (
        "mb used" in unit
    ):  # nvidia-smi: blocks that one part has freed do not serve another of other sizes
        return setting.engine.context_bytes + reserved(held_moments), "reserved"
    return highest.total, highest.phase


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


def seconds_per_unit(setting: Setting, unit: str) -> float:
    """Seconds for one token (or sample) at the printed meaning of a throughput: of one device or of
    all.
    """
    if setting.stage == "serve":
        decode = generation(setting, setting.model, setting.levers)[1]
        return decode[2] / (setting.workload.response_tokens * setting.levers.micro_batch)
    per_step = step_seconds(setting).seconds
    units = (
        setting.levers.micro_batch
        * setting.levers.accumulation
        * (1 if unit.startswith("samples") else setting.workload.mean_tokens)
    )
    devices = 1 if "per gpu" in unit else setting.data_parallel
    return per_step / (units * devices)


def feasibility(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """(row, whether we say that it does not fit) of the rows that ran out of memory."""
    found = []
    for row in rows:
        if "feasibility" in row.get("use", ()):
            setting = setting_of(row)
            found.append(
                (
                    row["id"],
                    device_bytes(setting, peak(moments(setting)).total)
                    > setting.hardware.usable_bytes,
                )
            )
    return found


# ---------------------------------------------------------------- errors


def weighted_quantile(errors: Iterable[tuple[str, float]], fraction: float) -> float:
    """Quantile of |error| in which every source weighs the same, however many rows it has."""
    pairs = list(errors)
    rows = {source: sum(1 for s, _ in pairs if s == source) for source, _ in pairs}
    ordered = sorted((abs(error), 1 / rows[source]) for source, error in pairs)
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
            refused.append((row["id"], str(error)))
    return found, refused


def summary(found: list[Case], quantity: str, tier: str = "A") -> dict[str, float]:
    """Median and 90th percentile of |error| over the rows of one tier, sources weighing the same;
    and the plain median.
    """
    errors = [
        (case.source, case.error)
        for case in found
        if case.quantity == quantity and case.tier == tier
    ]
    return {
        "rows": float(len(errors)),
        "median": weighted_quantile(errors, 0.5),
        "p90": weighted_quantile(errors, 0.9),
        "plain_median": median(abs(error) for _, error in errors) if errors else float("nan"),
    }


# ---------------------------------------------------------------- misses

LIMITS = {"memory": 0.10, "time": 0.25}
"""|error| above which a row is a miss."""

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "memory",
        "8bit_adamw",
        "the source's 8-bit optimizer holds 2 GiB more than 8-bit states need: the tied "
        "embedding's states may have stayed wide",
    ),
    (
        "memory",
        "llama2-7b_full_1x",
        "2.4 GB more than weights, checkpoints, logits and the largest gradient: its optimizer in "
        "the backward pass is not modelled",
    ),
    (
        "memory",
        "a6000",
        "by the source's note its settings differ from the 24 GB rows: the memory is that of a run "
        "without checkpointing",
    ),
    (
        "memory",
        "70b_full|70b_lora|405b|_2x|_4x|apr24",
        "several devices or unstated lengths: what is sharded, offloaded or packed is inferred",
    ),
    ("memory", "lora_tut", "sequence length is not stated: Alpaca rows assumed"),
    (
        "memory",
        "_2gpu|_4gpu",
        "peak of loading before sharding, activations of larger micro-batches come on top",
    ),
    (
        "time",
        "cum_baseline",
        "not packed: the mean length of the batch and which tokens are counted are not stated",
    ),
    (
        "time",
        "llama2-7b_full_1x",
        "54 GB of paged optimizer state moves over PCIe on demand, page by page: slower than the "
        "copies assumed",
    ),
    (
        "time",
        "mpt_70b_s2048_64x",
        "40 GB devices filled to the last: the allocator frees and allocates again in every step "
        "(the same model on 128 is 5% off)",
    ),
    (
        "time",
        "mpt_1b_s2048_32x",
        "an outlier of the source: 15,555 tokens/s between 19,085 on 16 devices and 19,001 on 64",
    ),
    (
        "time",
        "llama1",
        "parallel layout and recomputation are not stated: 380 tokens/s a device at 65B is 48% of "
        "the peak, we plan 63%",
    ),
    (
        "time",
        "405b_int8",
        "matrix-vector kernels reach less bandwidth at a width of 16384 over eight devices",
    ),
    (
        "time",
        "dschat",
        "batch and generation settings are not stated, and its generation is slower than its "
        "kernels allow: about twice our time",
    ),
    (
        "time",
        "_2gpu|_4gpu",
        "gathering a layer at a time leaves the device idle when micro-batches are this small",
    ),
    (
        "time",
        "70b_full|_2x|_4x|_8x",
        "several devices without NVLink or with offloading: transfers are only partly hidden",
    ),
    (
        "time",
        "infer_.*nf4|lora_.*nf4|adapter.*nf4",
        "4-bit kernels of bitsandbytes: one rate for all sizes",
    ),
)
"""(quantity, pattern of the row, why it is missed)."""


def misses(found: Iterable[Case]) -> list[tuple[Case, str]]:
    """Rows beyond LIMITS with the reason we know."""
    return [(case, reason(case)) for case in found if abs(case.error) > LIMITS[case.quantity]]


def reason(case: Case) -> str:
    return next(
        (
            text
            for quantity, pattern, text in REASONS
            if quantity == case.quantity and re.search(pattern, case.id)
        ),
        "not understood",
    )
