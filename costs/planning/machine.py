"""The machine that `rlhf calibrate` measured, as a device of the planner.

A stage that ran here for some steps is planned by the same formulas as everywhere, and each phase then takes as many
times longer as it did: its pace. What the formulas leave out of memory is added.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from config.errors import CostError
from config.records import LOOPS
from config.workspace.machine import MACHINE_FILE, Machine, TimedStage
from config.yaml_text import yaml_content
from costs.formulas.memory import Moment
from costs.formulas.process_heap import TRAINER_STAGES, phase_of
from costs.formulas.setting import Setting
from costs.tables.catalogue import GIB, Hardware, hardware, hardware_row

CALIBRATED_CPU = "cpu-calibrated"
"""A name of its own: plans for the table's `cpu` have other errors."""
M = TypeVar("M", bound=BaseModel)
BF16_SPEEDUP = 1.8
"""Speed of whole training passes relative to fp32, with AVX512-BF16: SmolLM2-135M, 256 tokens, forward and backward on
one thread of an EPYC, 162 against 89 tokens/s (20 November 2026). AMX is taken to be as fast; its matrix products
alone are faster.
"""
KIN = (LOOPS, TRAINER_STAGES, ("evaluate", "contest", "examine"))
"""Stages that one of them stands for, where they were not timed themselves."""


def this_machine(root: Path) -> Hardware | None:
    """The calibrated device of the project at `root`, None if it was not calibrated.

    Raises CostError for a file that cannot be read.
    """
    machine = calibration(root / MACHINE_FILE, Machine)
    return None if machine is None else device(machine)


def calibration(path: Path, kind: type[M]) -> M | None:
    """What `rlhf calibrate` wrote to a file, None if it is not there. Raises CostError for a file that cannot be
    read.
    """
    try:
        return kind.model_validate(yaml_content(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise CostError(
            f"{path} is damaged or of an earlier version: {first}. Run rlhf calibrate again, or delete the file."
        ) from None


def unmeasured(instructions: str | None) -> Hardware:
    """The table's CPU, with the rate of bf16 products that the processor's instructions allow."""
    cpu = hardware("cpu")
    return cpu if instructions is None else _with_rates(cpu, bf16=BF16_SPEEDUP)


def device(machine: Machine) -> Hardware:
    """A device with the machine's rates; power is the catalogue's, as it cannot be measured."""
    try:
        usual = hardware(machine.name)
    except CostError:
        usual = hardware("cpu")
    rates = machine.flops_per_second
    row = {
        "memory_gib": machine.memory_bytes / GIB,
        "usable_gib": machine.usable_bytes / GIB,
        "watts": usual.watts,
        "bandwidth_gb_per_second": machine.bytes_per_second / 1e9,
        "link_gb_per_second": usual.link_bytes_per_second / 1e9,
        "network_gb_per_second": usual.network_bytes_per_second / 1e9,
        **{f"{dtype}_tflops": rate / 1e12 for dtype, rate in rates.items()},
        "source": f"measured by rlhf calibrate on {machine.processor} with {machine.threads} "
        f"thread{'s' * (machine.threads > 1)}",
        "date": machine.date,
        "attainable": 1.0,
    }
    if machine.name != "cpu":
        return replace(hardware_row(machine.name, row), timed=machine.stages)
    calibrated = replace(hardware_row(CALIBRATED_CPU, row), timed=machine.stages)
    if "bf16" not in rates:  # emulated
        share = usual.peak("bf16") / usual.peak("fp32")
        return _with_rates(calibrated, bf16=share, fp16=share)
    return _with_rates(calibrated, bf16=BF16_SPEEDUP)


def _with_rates(device: Hardware, **shares: float) -> Hardware:
    """The device with rates that are shares of its fp32 rate."""
    peaks = dict(device.peak_flops_per_second)
    peaks |= {dtype: share * peaks["fp32"] for dtype, share in shares.items()}
    return replace(device, peak_flops_per_second=tuple(peaks.items()))


def timed(setting: Setting) -> TimedStage | None:
    """What was timed on the device of a setting for its stage and model."""
    return timed_stage(setting.hardware, setting.stage, setting.model.parameters)


def timed_stage(device: Hardware, stage: str, parameters: float = 1.0) -> TimedStage | None:
    """The stage as it was timed on a device, or one of its kin, with the model nearest in size; None where nothing
    was.
    """
    candidates = [candidate for candidate in device.timed if candidate.stage == stage]
    if not candidates:
        kin = next((kin for kin in KIN if stage in kin), ())
        candidates = [candidate for candidate in device.timed if candidate.stage in kin]
    return min(candidates, key=lambda candidate: abs(log(candidate.parameters / parameters)), default=None)


def was_timed(setting: Setting) -> bool:
    """Whether the stage itself ran on the device, with a model of this size."""
    nearest = timed(setting)
    return nearest is not None and (nearest.stage, nearest.parameters) == (setting.stage, setting.model.parameters)


def pace_of(stage: TimedStage | None, phase: str) -> float:
    """Measured over planned seconds of a phase: of one that was not timed, the stage's median."""
    if stage is None:
        return 1.0
    return stage.paces.get(phase) or median(stage.paces.values() or [1.0])


def with_measured(setting: Setting, moments: Iterable[Moment]) -> list[Moment]:
    """The moments of a stage with what a timed stage held beyond them."""
    stage, planned = timed(setting), list(moments)
    if stage is None or not stage.bytes:
        return planned
    most = max(stage.bytes.values())
    return [Moment(moment.phase, _grown(moment, stage.bytes.get(phase_of(moment), most))) for moment in planned]


def _grown(moment: Moment, more: float) -> dict[str, dict[str, float]]:
    process = moment.roles.get("process", {})
    beside = {**process, "workspace": process.get("workspace", 0.0) + more}
    return {**moment.roles, "process": beside}
