"""Run our `ppo` or `sft` stage in the current folder as `python -m training.<stage>` does, and keep what the
comparison needs besides its streams:

bench/process.json       bytes held after the imports
bench/responses.jsonl    of ppo, one row per update: token ids of prompts and responses (with
                         ppo.sample_every_updates 1)
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from training import ppo, sft
from training.process.run import run_stage
from training.process.stage import Stage

BENCH = Path("bench")


def keep_responses(
    stage: Stage, update: int, tokenizer: Any, prompts: Sequence[list[int]], responses: Sequence[list[int]], *_: Any
) -> None:
    """Stands in for the stage's writer of sample responses, which keeps a few of them as text."""
    with (BENCH / "responses.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"update": update, "prompts": list(prompts), "responses": list(responses)}) + "\n")


if __name__ == "__main__":
    BENCH.mkdir(exist_ok=True)
    after_imports = 0 if torch.cuda.is_available() else psutil.Process().memory_info().rss
    (BENCH / "process.json").write_text(json.dumps({"after_imports_bytes": after_imports}) + "\n", encoding="utf-8")
    if sys.argv[1] == "sft":
        sys.exit(run_stage("sft", sft.SECTIONS, sft.INPUTS, sft.sft))
    if not hasattr(ppo, "write_samples"):
        sys.exit(
            "training.ppo has no write_samples any more: fix keep_responses in benchmarks/trl_comparison/our_side.py."
        )
    ppo.write_samples = keep_responses
    sys.exit(run_stage("ppo", ppo.SECTIONS, ppo.INPUTS, ppo.ppo))
