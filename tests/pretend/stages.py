"""Every stage and method, one after another in one process, on the CPU or on the pretended accelerator: `python -m
tests.pretend.stages cpu|sim FOLDER`.
"""

import gc
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from config.errors import EXIT_RESUMABLE
from config.load import write
from config.schema import Params
from tests.training.support.tiny import DISTILL, params, run_main
from training.process.stage import Stage

LORA = {"rank": 4, "alpha": 8.0, "modules": ["q", "k", "v", "o", "gate", "up", "down"], "dropout": 0.0}
FAST = {"max_steps": 4, "checkpoint_every_steps": 2}
SHORT = {"updates": 2, "checkpoint_every_updates": 1}


class Cell(NamedTuple):
    """A stage with its section, in a folder with what was made from `base`."""

    name: str
    stage: str
    section: dict[str, Any]
    base: str = "whole"
    after: str = ""
    """The cell whose aligned model it reads."""
    device_bytes: int = 2**40
    """Memory of the pretended accelerator."""
    stops: bool = False
    """As if it were asked to stop in its first update, and then started again."""


BASES: dict[str, dict[str, Any]] = {
    "whole": {"sft": FAST, "reward": FAST},
    "adapted": {"sft": FAST | {"lora": LORA}, "reward": FAST | {"lora": LORA, "init": "sft"}},
}
CELLS = (
    Cell("dpo", "dpo", FAST),
    Cell("kto", "kto", FAST),
    Cell("ppo", "ppo", SHORT),
    Cell("ppo paged", "ppo", SHORT | {"rollout_engine": "paged"}),
    Cell("ppo shared_trunk", "ppo", SHORT | {"layout": "shared_trunk"}),
    Cell("ppo checkpointed", "ppo", SHORT | {"activation_checkpointing": True}),
    Cell("ppo recomputed", "ppo", SHORT | {"recompute_logprobs": True}),
    Cell("ppo stopped", "ppo", SHORT, stops=True),
    Cell("ppo in pieces", "ppo", SHORT | {"micro_batch_tokens": 100}),
    Cell("ppo halved", "ppo", SHORT | {"micro_batch_tokens": 600}, device_bytes=2_500_000),
    Cell("rloo", "rloo", SHORT),
    Cell("grpo", "grpo", SHORT),
    Cell("distill", "distill", DISTILL | SHORT | {"sft_updates": 1}, after="ppo"),
    Cell("evaluate", "evaluate", {}, after="ppo"),
    Cell("dpo adapted", "dpo", FAST | {"lora": LORA}, "adapted"),
    Cell("kto adapted", "kto", FAST | {"lora": LORA}, "adapted"),
    Cell("ppo adapted", "ppo", SHORT | {"lora": LORA}, "adapted"),
    Cell("ppo paged adapted", "ppo", SHORT | {"lora": LORA, "rollout_engine": "paged"}, "adapted"),
    Cell("ppo shared_base", "ppo", SHORT | {"lora": LORA, "layout": "shared_base"}, "adapted"),
    Cell("rloo adapted", "rloo", SHORT | {"lora": LORA}, "adapted"),
    Cell("grpo adapted", "grpo", SHORT | {"lora": LORA}, "adapted"),
)


def settings(cell: Cell) -> Params:
    """The cell's params: two heads of queries share keys and values."""
    method = cell.stage if cell.stage in ("dpo", "kto", "rloo", "grpo") else "ppo"
    random = params().model.random
    assert random is not None
    model = (
        {"random": random.model_dump() | {"heads": 4, "kv_heads": 2}}
        if cell.base == "whole"
        else {"random": None, "path": "./base"}
    )
    section = {cell.stage: cell.section} if cell.section else {}
    return params(**BASES[cell.base], model=model, align={"method": method}, **section)


def main(folder: Path, waits: Counter[str], memory: Any) -> None:
    """Run every cell; how it exited and where the host waited for the device go to FOLDER/found.json."""
    result = {}
    for base in BASES:
        root = folder / base
        root.mkdir()
        write(settings(Cell(base, "", {}, base)), root / "params.yaml")
        if base == "adapted":
            for folder_name in ("data", "metrics"):
                shutil.copytree(folder / "whole" / folder_name, root / folder_name)
            shutil.copytree(folder / "whole" / "models" / "sft", root / "base")
        else:
            result["data"] = run_main(root, "data"), {}
        for stage in ("sft", "reward"):
            result[f"{base} {stage}"] = run_main(root, stage), {}
    for cell in CELLS:
        root = folder / cell.name.replace(" ", "-")
        shutil.copytree(folder / cell.base, root)
        write(settings(cell), root / "params.yaml")
        if cell.after:
            shutil.copytree(folder / cell.after / "models" / "ppo", root / "models" / "ppo")
        gc.collect()  # a trainer of the cell before lives in cycles
        waits.clear()
        memory.total = cell.device_bytes
        if cell.stops:
            with mock.patch.object(Stage, "synchronise_stop", stop):
                assert run_main(root, cell.stage) == EXIT_RESUMABLE
        result[cell.name] = run_main(root, cell.stage), dict(waits)
        memory.total = 2**40
    (folder / "found.json").write_text(json.dumps(result))


def stop(stage: Stage) -> bool:
    stage.stopping = True
    return True


if __name__ == "__main__":
    if sys.argv[1] == "sim":
        from tests.pretend.accelerator import SYNCS, Memory

        main(Path(sys.argv[2]), SYNCS, Memory)
    else:
        main(Path(sys.argv[2]), Counter(), SimpleNamespace())
