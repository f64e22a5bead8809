"""Measures this machine for the planner: `python -m training.calibrate.machine` writes
config/workspace/machine.py's Machine as YAML.
"""

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch
import yaml

from config.errors import EnvironmentFault
from config.workspace.machine import MACHINE_FILE, Machine
from training.calibrate.rates import agreed, decode_step_seconds, measured_round
from training.calibrate.stages import loop, stage_processes
from training.process import allocator
from training.process.artifacts import replacing
from training.process.command import run_command
from training.process.device import device, device_name

logger = logging.getLogger(__name__)


def measure() -> Machine:
    """Measure everything, with a progress line for each part."""
    began, others = time.perf_counter(), OtherLoad()
    measured_on = device().type

    def tell(part: str) -> None:
        logger.info("%5.1f s  %s", time.perf_counter() - began, part)

    tell("starting a stage of each kind in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        stages = stage_processes(Path(folder))
    tell("updates of PPO")
    with tempfile.TemporaryDirectory() as folder:
        updates = loop(Path(folder))
    tell(
        "matrix products, memory bandwidth, attention, whole models, log-probabilities, decoding, "
        "optimizer"
    )
    first, first_step = measured_round(measured_on), decode_step_seconds(measured_on)
    tell("the same again")
    rates = agreed(first, measured_round(measured_on))
    step = min(first_step, decode_step_seconds(measured_on))
    others.check(torch.get_num_threads())
    name, memory, usable = device_memory(measured_on)
    seconds = time.perf_counter() - began
    tell("done")
    return Machine(
        name=name,
        processor=processor_name(),
        threads=torch.get_num_threads(),
        memory_bytes=memory,
        usable_bytes=usable,
        torch=torch.__version__,
        date=datetime.now(UTC).date().isoformat(),
        decode_step_seconds=step,
        stages=stages,
        loop=updates,
        seconds=seconds,
        **rates,
    )


BUSY = 0.25
"""Share of the threads that other programs may keep busy."""


class OtherLoad:
    """Samples the processor time of other programs from here on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = self._now()

    def _now(self) -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return (
            time.perf_counter(),
            sum(times[:8]) - idle,
            own.user + own.system + own.children_user + own.children_system,
        )

    def check(self, threads: int) -> None:
        """Raise EnvironmentFault if other programs left too little for our `threads`."""
        wall, everything, own = (
            now - then
            for now, then in zip(self._now(), (self._wall, self._all, self._own), strict=True)
        )
        check_quiet((everything - own) / wall, psutil.cpu_count() or 1, threads)


def check_quiet(other_cores: float, cores: int, threads: int) -> None:
    """Raise EnvironmentFault if other programs, which used `other_cores` of `cores` on average,
    kept more than BUSY of the threads waiting.
    """
    missing = other_cores - (cores - threads)
    if missing > BUSY * threads:
        raise EnvironmentFault(
            f"other programs used {other_cores:.1f} of {cores} cores while {threads} threads were "
            "measured: the machine is busy, and plans from these "
            "rates would be wrong. Run rlhf calibrate again when nothing else is running, or with "
            "fewer threads (OMP_NUM_THREADS)."
        )


def device_memory(device: str) -> tuple[str, int, int]:
    """(name, bytes, bytes available to programs) of the device of stages; for a CPU within its
    control group.
    """
    if device != "cpu":
        free, total = torch.accelerator.get_memory_info()
        return device_name(torch.device(device)), total, free
    memory = psutil.virtual_memory()
    limits = [memory.total]
    for path in (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        text = path.read_text().strip() if path.exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return "cpu", min(limits), min(limits)


def processor_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def write(machine: Machine, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(
            "# Written by rlhf calibrate: this machine, for rlhf plan. Delete it to plan with "
            "costs/tables/hardware.yaml again.\n"
            + yaml.safe_dump(
                machine.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=140
            ),
            encoding="utf-8",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure this machine for rlhf plan.")
    parser.add_argument("--out", type=Path, default=MACHINE_FILE)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    allocator.configure()  # as in a stage
    return run_command(lambda: write(measure(), options.out), "calibrate")


if __name__ == "__main__":
    sys.exit(main())
