"""One of several processes with a divided model; writes how much of its memory that took.

`python -m tests.training.support.divided save|load|models FOLDER`
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from training.distributed import collectives
from training.distributed.model_files import save_model
from training.distributed.shards import load_optimizer, load_tensors, save_optimizer, save_tensors
from training.process.usage import peak_memory_bytes, reset_peak_memory

WIDTH, LAYERS = 1536, 4
WHOLE_BYTES = 3 * 4 * LAYERS * WIDTH**2
"""Weights and two moments."""
SHARD_BYTES = 15_000_000
"""Of the files of a finished model: some of SHAPES need several."""
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 300,
        "n_positions": 32, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    },
    "experts": {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 300, "num_local_experts": 4,
    },
    "wide": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Models to be saved: tied weights; experts, which the hub has apart; many tensors of like size."""


def built(shape: str) -> PreTrainedModel:
    """A model of a shape, with the same weights each time."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]))


def divided(shape: str) -> PreTrainedModel:
    """The same, divided as training/distributed/sharding.py divides it."""
    model = built(shape)
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in [*layers, model]:
        fully_shard(part)
    return model


def model_bytes(shape: str) -> int:
    return sum(parameter.nbytes for parameter in built(shape).parameters())


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    collectives.join("divided", torch.device("cpu"))
    result = save_models(folder) if what == "models" else checkpoint(what, folder)
    sys.stdout.write(json.dumps(result))
    collectives.leave()


def grown(work: Callable[[], None]) -> int:
    """Bytes by which the resident set passes what it was, at the peak of `work`."""
    collectives.barrier()
    reset_peak_memory(accelerator=False)
    before = peak_memory_bytes(accelerator=False)
    work()
    return peak_memory_bytes(accelerator=False) - before


def save_models(folder: Path) -> dict[str, Any]:
    """Save each of SHAPES; what the last one took, when all that is loaded once has been."""
    took = {}
    for shape in SHAPES:
        model = divided(shape)
        took[shape] = grown(lambda shape=shape, model=model: save_model(folder / shape, model, SHARD_BYTES))
    return {"grown": took["wide"]}


def checkpoint(what: str, folder: Path) -> dict[str, Any]:
    """What saving or loading a checkpoint took, and sums of what is in it."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for part in [*model, model]:
        fully_shard(part)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.1, fused=True)
    if what == "save":
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        model.zero_grad()

    def work() -> None:
        if what == "save":
            save_tensors(folder / "weights", named)
            save_optimizer(folder / "optimizer", optimizer, named)
        else:
            load_tensors(folder / "weights", named)
            load_optimizer(folder / "optimizer", optimizer, named)

    took = grown(work)
    sums = [float(parameter.detach().double().sum().full_tensor()) for parameter in named.values()]  # type: ignore[attr-defined]
    moments = [
        float(optimizer.state[parameter]["exp_avg"].double().sum().full_tensor()) for parameter in named.values()
    ]
    return {"grown": took, "sums": [*sums, *moments]}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
