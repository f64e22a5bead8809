"""Run one stage in the current folder as `python -m training.STAGE` does, and keep what
benchmarks/plan_accuracy.py needs besides its rows:

bench/process.json   bytes held after the imports; bytes of weights, gradients and optimizer at an
                     optimizer step; CPU seconds of every usage row;
                     seconds of the trunks that rlhf calibrate measures
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from training.calibrate.rates import pace
from training.process.device import device
from training.process.stage import entry, run_stage
from training.process.usage import Meter

BENCH = Path("bench")
found: dict[str, Any] = {"cpu_seconds": []}


def note_parts(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After an optimizer step, before the gradients are dropped: bytes of each kind of state, every
    storage once.
    """
    if "weights_bytes" in found:
        return
    state = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    weights = [
        p
        for module in gc.get_objects()
        if isinstance(module, torch.nn.Module)
        for p in module.parameters(recurse=False)
    ]
    gradients = [p.grad for p in weights if p.grad is not None]
    found.update(
        {
            f"{name}_bytes": storage_bytes(of)
            for name, of in (("weights", weights), ("gradients", gradients), ("optimizer", state))
        }
    )


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in own
    }
    return sum(storages.values())


class CpuMeter:
    """Notes the CPU seconds of the process beside every usage row: what a stage would take on an
    idle machine with one thread.
    """

    def __init__(self) -> None:
        self._append = Meter._append
        self._last = 0.0

    def __call__(self, meter: Meter, phase: str, step: int, seconds: float, work: Any) -> None:
        now = time.process_time()
        found["cpu_seconds"].append([phase, step, now - self._last])
        self._last = now
        self._append(meter, phase, step, seconds, work)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage")
    options = parser.parse_args()
    own = entry(options.stage)
    BENCH.mkdir(exist_ok=True)
    found["after_imports_bytes"] = psutil.Process().memory_info().rss
    register_optimizer_step_post_hook(note_parts)
    meter = CpuMeter()
    Meter._append = lambda *arguments: meter(*arguments)  # type: ignore[method-assign]
    if options.stage == "evaluate":
        torch.set_grad_enabled(False)
    code = run_stage(options.stage, *own)
    if os.environ.get("RANK", "0") != "0":
        return code
    found["pace"] = pace(device().type)
    (BENCH / "process.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
