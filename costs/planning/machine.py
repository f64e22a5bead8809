"""This machine as a device of the planner: the rates that `rlhf calibrate` measured, and what stages took here.

A stage that ran here is planned by what it took: seconds for a unit of each phase times the units, and the memory at
its micro-batch. Formulas plan the others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import median, stdev

import yaml
from pydantic import ValidationError

from config.errors import CostError
from config.records import TimedRow
from config.workspace.machine import MACHINE_FILE, Machine
from config.yaml_text import yaml_content
from costs.formulas.memory import Moment, phase_of, phase_peak
from costs.formulas.setting import Setting
from costs.tables.catalogue import GIB, Hardware, hardware, hardware_row

CALIBRATED_CPU = "cpu-calibrated"
"""A name of its own: plans for the table's `cpu` have other errors."""
BF16_SPEEDUP = 1.8
"""Speed of whole training passes relative to fp32, with AVX512-BF16: SmolLM2-135M, 256 tokens, forward and backward on
one thread of an EPYC, 162 against 89 tokens/s (20 November 2026). AMX is taken to be as fast; its matrix products
alone are faster.
"""
NEWEST_RUNS = 5
"""Older runs had other code."""
FEWEST_RUNS = 3
"""Fewest runs that tell how much they differ."""


def this_machine(root: Path) -> Hardware | None:
    """The calibrated device of the project at `root`, None if it was not calibrated.

    Raises CostError for a file that cannot be read.
    """
    path = root / MACHINE_FILE
    try:
        return device(Machine.model_validate(yaml_content(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise CostError(
            f"{path} is damaged or of an earlier version: {first}. Run rlhf calibrate again, or delete the file."
        ) from None


def with_timings(device: Hardware, rows: Iterable[TimedRow]) -> Hardware:
    """The device with what stages took on it, of these rows."""
    same = [row for row in rows if row.hardware == device.name or (device.is_cpu and row.hardware.startswith("cpu"))]
    return replace(device, timed=tuple(same))


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
        return hardware_row(machine.name, row)
    calibrated = hardware_row(CALIBRATED_CPU, row)
    if "bf16" not in rates:  # emulated
        share = usual.peak("bf16") / usual.peak("fp32")
        return _with_rates(calibrated, bf16=share, fp16=share)
    return _with_rates(calibrated, bf16=BF16_SPEEDUP)


def _with_rates(device: Hardware, **shares: float) -> Hardware:
    """The device with rates that are shares of its fp32 rate."""
    peaks = dict(device.peak_flops_per_second)
    peaks |= {dtype: share * peaks["fp32"] for dtype, share in shares.items()}
    return replace(device, peak_flops_per_second=tuple(peaks.items()))


Timings = list[list[TimedRow]]
"""The rows of each run of a stage, or of each calibration, oldest first."""


def timings(setting: Setting) -> Timings:
    """A stage that runs a model, as it was timed on the device of its setting with the same model and levers."""
    return stage_timings(setting.hardware, setting.stage, held(setting))


def held(setting: Setting) -> str:
    """What a stage's time for a unit depends on, and its memory beside the micro-batch."""
    levers = asdict(setting.levers)
    words = [str(levers[name]) for name in levers if name not in ("micro_batch", "accumulation")]
    if (loop := setting.rlhf) is not None:
        words += [loop.layout, str(loop.rollout_batch), str(loop.mini_batches)]
    return " ".join([f"{setting.model.parameters:.0f} parameters, {setting.gpus} processes,", *words])


def stage_timings(device: Hardware, stage: str, held: str = "") -> Timings:
    """The newest runs of a stage on `device`, before there is one its calibrations; [] where it was never timed."""
    same = [row for row in device.timed if (row.stage, row.held) == (stage, held)]
    by_source: dict[tuple[str, float], list[TimedRow]] = {}
    for row in [row for row in same if row.run_id] or same:
        by_source.setdefault((row.run_id, 0.0 if row.run_id else row.time), []).append(row)
    return list(by_source.values())[-NEWEST_RUNS:]


def timed_seconds(timings: Timings, units: Mapping[str, float]) -> dict[str, float]:
    """Phase -> median seconds of these units."""
    by_phase: dict[str, list[float]] = {}
    for row in (row for run in timings for row in run if row.phase in units):
        by_phase.setdefault(row.phase, []).append(row.seconds / row.units * units[row.phase])
    return {phase: median(seconds) for phase, seconds in by_phase.items()}


def deviation(timings: Timings, units: Mapping[str, float]) -> float | None:
    """Standard deviation of the logarithm of the stage's time; None from fewer than FEWEST_RUNS."""
    logs = [log(sum(timed_seconds([run], units).values())) for run in timings]
    return stdev(logs) if len(logs) >= FEWEST_RUNS else None


def timed_peak(timings: Timings, phase: str, micro_batch: float) -> float | None:
    """Bytes of a phase at a micro-batch: the last measured at this one, or on the straight line through the two
    nearest that were; None where only one other was.
    """
    peaks = {row.micro_batch: row.peak_bytes for run in timings for row in run if row.phase == phase}
    if micro_batch in peaks:
        return peaks[micro_batch]
    nearest = sorted(peaks, key=lambda size: abs(log(size / micro_batch)))[:2]
    if len(nearest) < 2:
        return None
    a, b = nearest
    return peaks[a] + max(0.0, (peaks[b] - peaks[a]) / (b - a)) * (micro_batch - a)


def with_measured(setting: Setting, moments: Iterable[Moment]) -> list[Moment]:
    """The moments of a stage, each phase as high as it was measured: the difference is the process's."""
    planned, runs = list(moments), timings(setting)
    beyond = {
        phase: peak - phase_peak(planned, phase)
        for phase in {phase_of(moment) for moment in planned}
        if (peak := timed_peak(runs, phase, setting.levers.micro_batch)) is not None
    }
    return [_grown(moment, beyond[phase_of(moment)]) if phase_of(moment) in beyond else moment for moment in planned]


def _grown(moment: Moment, more: float) -> Moment:
    outside = moment.roles.get("process", {}).get("workspace", 0.0)
    return replace(moment, roles=moment.roles | {"process": {"workspace": max(0.0, outside + more)}})
