"""`python -m tests.training.divided save|load FOLDER`: one of several processes with a divided
model; writes what that took of its memory.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from training.distributed import collectives
from training.distributed.shards import load_optimizer, load_tensors, save_optimizer, save_tensors
from training.process.usage import peak_memory_bytes, reset_peak_memory

WIDTH, LAYERS = 1536, 4
WHOLE_BYTES = 3 * 4 * LAYERS * WIDTH**2
"""Weights and two moments."""


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    collectives.join("divided", accelerator=False)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for part in [*model, model]:
        fully_shard(part)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.1, fused=True)
    if what == "save":
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        model.zero_grad()
    collectives.barrier()
    reset_peak_memory(accelerator=False)
    before = peak_memory_bytes(accelerator=False)
    if what == "save":
        save_tensors(folder / "weights", named)
        save_optimizer(folder / "optimizer", optimizer, named)
    else:
        load_tensors(folder / "weights", named)
        load_optimizer(folder / "optimizer", optimizer, named)
    grown = peak_memory_bytes(accelerator=False) - before
    sums = [float(parameter.detach().double().sum().full_tensor()) for parameter in named.values()]  # type: ignore[attr-defined]
    moments = [
        float(optimizer.state[parameter]["exp_avg"].double().sum().full_tensor())
        for parameter in named.values()
    ]
    sys.stdout.write(json.dumps({"grown": grown, "sums": [*sums, *moments]}))
    collectives.leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
