"""Drawn settings of every method on the pretended accelerator, and the memory that each phase held there beside its
plan: `python -m tests.pretend.plans FOLDER`.

Six shapes; for each supervised fine-tuning and four alignments, with all weights and with adapters, of batches,
lengths and recomputation that are drawn from a seed. Stages on pairs are left out: a plan takes all pairs of a batch
as long as the longest, and a hundred pairs differ too much.
"""

import gc
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import planned_bytes
from config import jsonl
from config.errors import EXIT_DONE
from config.load import write
from config.methods.registry import SAMPLING_METHODS
from config.records import UsageRow
from config.schema import Params
from tests.training.support.tiny import params, run_main

SHAPES: tuple[dict[str, Any], ...] = (
    {"family": "llama", "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 64},
    {"family": "llama", "width": 96, "layers": 4, "heads": 4, "kv_heads": 4, "mlp_width": 256},
    {"family": "qwen2", "width": 64, "layers": 3, "heads": 4, "kv_heads": 1, "mlp_width": 160},
    {"family": "qwen3", "width": 128, "layers": 1, "heads": 4, "kv_heads": 2, "mlp_width": 512},
    {"family": "llama", "width": 48, "layers": 6, "heads": 2, "kv_heads": 2, "mlp_width": 96},
    {"family": "qwen3", "width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 192},
)
MODULES = ("q", "k", "v", "o", "up", "down")
METHODS = (("ppo", "separate"), ("ppo", "other"), ("rloo", ""), ("grpo", ""))
"""With their layouts: the other is shared_trunk, with adapters shared_base."""


def main(folder: Path) -> None:
    """Run all, and write [cell, phase, planned bytes, held bytes] to FOLDER/found.json."""
    rng, result = random.Random(1), list[tuple[str, str, float, int]]()
    for number, shape in enumerate(SHAPES):
        for adapted in (False, True):
            name = f"{number} {'adapters' if adapted else 'all'}"
            root = folder / name.replace(" ", "-")
            root.mkdir(parents=True)
            plain = folder / f"{number}-all"
            rank = rng.choice((4, 16)) if adapted else 0
            chosen = drawn(shape, rank, "ppo", rng)
            write(chosen, root / "params.yaml")
            if adapted:
                for folder_name in ("data", "metrics"):
                    shutil.copytree(plain / folder_name, root / folder_name)
                shutil.copytree(plain / "models" / "sft", root / "base")
            else:
                assert run_main(root, "data") == EXIT_DONE
            result += measured(root, name, "sft")
            measured(root, name, "reward")
            for method, layout in METHODS:
                other = folder / f"{root.name}-{method}-{layout}"
                shutil.copytree(root, other)
                write(drawn(shape, rank, method, rng, layout), other / "params.yaml")
                result += measured(other, f"{name} {layout}".strip(), method)
                shutil.rmtree(other)
        (folder / "found.json").write_text(json.dumps(result))


def drawn(shape: dict[str, Any], rank: int, method: str, rng: random.Random, layout: str = "separate") -> Params:
    """Params of a cell; `rank` 0 trains all weights."""
    lora = {"rank": rank, "alpha": 8.0, "modules": list(MODULES), "dropout": 0.0}
    adapter = {"lora": lora} if rank else {}
    trainer = adapter | {"max_steps": 3, "micro_batch_size": 8, "batch_size": 16}
    if layout == "other":
        layout = "shared_base" if rank else "shared_trunk"
    batch = rng.choice((8, 16, 32))
    section = adapter | {
        "updates": 2, f"{method}_epochs": 1, "checkpoint_every_updates": 9, "batch_size": batch,
        "rollout_batch_size": batch, "max_new_tokens": rng.choice((8, 16, 24)),
        "micro_batch_tokens": rng.choice((300, 600, 2400)), "num_mini_batches": 1,
        "responses_per_prompt": 1 if method == "ppo" else 2,
        "activation_checkpointing": rng.random() < 0.4,
    } | ({"layout": layout} if method == "ppo" else {})  # fmt: skip
    random_shape = params().model.random
    assert random_shape is not None
    model = random_shape.model_dump() | shape | {"tie_embeddings": shape["family"] == "qwen2"}
    return params(
        model={"random": None, "path": "./base"} if rank else {"random": model},
        align={"method": method},
        **{
            "sft": trainer,
            "reward": trainer | {"init": "sft"},
            "data": {"source": params().data.source.model_dump() | {"sft_rows": 300}},
            method: section,
        },
    )


def measured(root: Path, name: str, stage: str) -> list[tuple[str, str, float, int]]:
    """Run a stage; the plan and the peak of each of its phases."""
    gc.collect()  # a trainer of the cell before lives in cycles
    assert run_main(root, stage) == EXIT_DONE, (name, stage)
    rows = list(jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows)
    planned = planned_bytes(root, stage, rows)
    kept = planned if stage in SAMPLING_METHODS else {"train": planned["train"]}
    return [
        (f"{name} {stage}", phase, bytes_, max(r.peak_bytes for r in rows if r.phase == phase))
        for phase, bytes_ in kept.items()
    ]


if __name__ == "__main__":
    import tests.pretend.accelerator  # noqa: F401  # registers the device

    main(Path(sys.argv[1]))
