"""The plan of a stage, from its phases and its moments of memory."""

from dataclasses import asdict

from costs.formulas.counts import mfu
from costs.formulas.memory import Moment, device_bytes, peak, phase_peak
from costs.formulas.setting import Setting
from costs.formulas.time import energy_kwh
from costs.planning.grades import memory_interval, time_interval
from costs.planning.machine import held, timings
from costs.planning.moments import moments
from costs.planning.phases import Phase, phases, processed_tokens, units_of
from costs.planning.plans import PhasePlan, StagePlan, Usd
from costs.tables.catalogue import Price


def plan_stage(setting: Setting, price: Price, find_lever: bool = True) -> StagePlan:
    """The plan of one stage at a price per device-hour. Raises CostError for a stage that has no formulas."""
    return planned(setting, price, phases(setting), moments(setting), find_lever)


def planned(
    setting: Setting, price: Price, phases: list[Phase], memory: list[Moment], find_lever: bool = True
) -> StagePlan:
    """The plan of a stage whose phases and moments of memory are known."""
    highest = peak(memory)
    needed = device_bytes(setting, highest.total)
    seconds = sum(phase.seconds for phase in phases)
    gpu_hours = seconds * setting.devices / 3600
    shortfall = max(0.0, needed - setting.hardware.usable_bytes)
    rate = price.expected / 3600 * setting.paid_gpus
    paid_hours = seconds * setting.paid_gpus / 3600
    tokens, units = processed_tokens(setting), {phase.name: units_of(setting, phase.name) for phase in phases}
    return StagePlan(
        stage=setting.stage,
        hardware=setting.hardware.name,
        gpus=setting.devices,
        rented=setting.paid_gpus,
        idle_usd=(paid_hours - gpu_hours) * price.expected,
        fits=shortfall == 0,
        shortfall_bytes=shortfall,
        lever=closing_lever(setting) if shortfall and find_lever else "",
        peak_bytes_per_gpu=highest.total,
        device_bytes_per_gpu=needed,
        peak_phase=highest.phase,
        memory=highest.roles,
        phases=tuple(
            PhasePlan(
                p.name,
                p.work.flops * setting.gpus,
                p.work.total_bytes * setting.gpus,
                p.seconds,
                p.bound,
                p.seconds * rate,
                phase_peak(memory, p.name),
            )
            for p in phases
        ),
        seconds=seconds,
        gpu_hours=gpu_hours,
        kwh=energy_kwh(gpu_hours, setting.hardware.watts),
        usd=Usd(paid_hours * price.low, paid_hours * price.expected, paid_hours * price.high),
        steps=setting.workload.steps,
        tokens=tokens,
        mfu=mfu(
            setting.model,
            tokens / seconds / setting.gpus,
            setting.workload.mean_tokens,
            setting.hardware.peak(setting.levers.dtype),
        )
        if seconds
        else 0.0,
        levers=asdict(setting.levers),
        assumptions=(*setting.assumptions, *taught_nothing_note(setting)),
        time_interval=time_interval(setting, seconds, units),
        memory_interval=memory_interval(setting, highest.total),
        held=held(setting),
        units=units,
    )


def taught_nothing_note(setting: Setting) -> tuple[str, ...]:
    """What the last run here paid for replies that were all scored alike, if it did."""
    share = max((row.taught_nothing for run in timings(setting)[-1:] for row in run), default=0.0)
    if not share:
        return ()
    return (f"{setting.stage}: replies that taught nothing were {share:.0%} of its cost in the last run here",)


# ---------------------------------------------------------------- making it fit

FITTING_LEVERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("activation_checkpointing: true", {"checkpointing": "full"}),
    ("micro_batch_size: 1", {"micro_batch": 1}),
    ("micro_batch_size: 1 and activation_checkpointing: true", {"micro_batch": 1, "checkpointing": "full"}),
    ("an 8-bit optimizer", {"optimizer": "adamw8bit", "checkpointing": "full"}),
    ("FSDP over the devices", {"parallel": "fsdp", "checkpointing": "full"}),
    ("LoRA", {"tuning": "lora", "weights_fp32": False, "checkpointing": "full"}),
    (
        "LoRA with micro_batch_size: 1",
        {"tuning": "lora", "weights_fp32": False, "checkpointing": "full", "micro_batch": 1},
    ),
    (
        "QLoRA with micro_batch_size: 1",
        {"tuning": "lora", "weights_fp32": False, "quantisation": "nf4-dq", "checkpointing": "full", "micro_batch": 1},
    ),
    (
        "QLoRA over FSDP",
        {
            "tuning": "lora",
            "weights_fp32": False,
            "quantisation": "nf4-dq",
            "checkpointing": "full",
            "micro_batch": 1,
            "parallel": "fsdp",
        },
    ),
)
"""Tried in this order: what costs least time and changes the training least comes first."""


def closing_lever(setting: Setting) -> str:
    """The first lever that makes the stage fit, or the least memory that the stage needs."""
    smallest = float("inf")
    for name, changes in FITTING_LEVERS:
        if changes.get("parallel") == "fsdp" and setting.gpus == 1:
            continue
        micro = changes.get("micro_batch", setting.levers.micro_batch)
        accumulation = setting.levers.accumulation * setting.levers.micro_batch // int(str(micro))
        needed = device_bytes(
            setting, peak(moments(setting.with_levers(**changes, accumulation=max(1, accumulation)))).total
        )
        if needed <= setting.hardware.usable_bytes:
            return name
        smallest = min(smallest, needed)
    return (
        f"nothing tried fits: it needs at least {smallest / 2**30:.1f} GiB a device; take a larger "
        "device or more of them"
    )
