"""What reading the common beginning of a pair once saves: CPU seconds of forward and backward over
the demo's preference pairs, of TRL's padded batch and of ours, in turn.

    python -m benchmarks.pair_forward [--recipe recipes/demo.yaml] [--batches 20] [--json]

Batches are those of the reward stage in their order. `reward` is Transformers' own forward against
training/modeling/scoring.py, `dpo` TRL's with its fused head against
training/modeling/sequences.py. Time is the CPU time of one thread, which other work on the machine
disturbs less than wall time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head

from config.load import load, write
from training.modeling.batching import LengthBuckets
from training.modeling.models import base_model, new_reward_model
from training.modeling.scoring import score_in_pairs
from training.modeling.sequences import IGNORED, logprobs_in_pairs
from training.modeling.tokenizer import load_tokenizer
from training.preparation.preferences import Pairs, read_pairs, sequence_length
from training.process.stage import Stage
from training.reward import INPUTS, SECTIONS

ROOT = Path(__file__).resolve().parent.parent
ROWS = 3000
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")
"""What DPOTrainer asks TRL's head for."""

Loss = Callable[[PreTrainedModel, dict[str, Tensor]], Tensor]


def prepared(recipe: Path, root: Path) -> None:
    """The data stage of a recipe, with fewer rows of the helpdesk."""
    rows = [f"data.source.{kind}_rows={ROWS}" for kind in ("sft", "preference", "prompt")]
    write(load(recipe, rows), root / "params.yaml")
    subprocess.run(
        [sys.executable, "-m", "training.data"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )


def batches(pairs: Pairs, stage: Stage, pad: int, count: int) -> Iterator[dict[str, Tensor]]:
    """The first `count` batches as TRL's collator hands them out."""
    collate = DataCollatorForPreference(pad_token_id=pad)
    size = stage.params.reward.micro_batch_size
    lengths = [sequence_length(row) for row in pairs.rows]
    order = list(LengthBuckets(lengths, size, stage.params.seed))
    for start in range(0, min(count * size, len(order) - size), size):
        yield dict(collate([pairs.rows[i] for i in order[start : start + size]]))


def reward_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    found = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    chosen, rejected = found.logits.squeeze(-1).chunk(2)
    return -logsigmoid(chosen - rejected).mean()


def dpo_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
    found = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=labels,
        fused_lm_head=True,
        use_cache=False,
    )
    chosen, rejected = found.log_probs.sum(dim=1).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected)).mean()


def cpu_seconds(model: PreTrainedModel, loss_of: Loss, batch: dict[str, Tensor]) -> float:
    model.zero_grad()
    began = time.process_time()
    loss_of(model, batch).backward()
    return time.process_time() - began


def models(
    stage: Stage, tokenizer: PreTrainedTokenizerBase
) -> dict[str, tuple[Loss, PreTrainedModel, PreTrainedModel]]:
    """By stage its loss, the model that reads padded batches, and the one that reads pairs."""
    settings, seed = stage.params.model, stage.params.seed

    def policy() -> PreTrainedModel:
        return base_model(settings, tokenizer, seed, trainable=True).train()

    def scorer() -> PreTrainedModel:
        return new_reward_model(policy(), settings, tokenizer, seed).train()

    padded, once, padded_policy, once_policy = scorer(), scorer(), policy(), policy()
    score_in_pairs(once)
    add_fused_lm_head(padded_policy, outputs=FIELDS)
    logprobs_in_pairs(once_policy)
    return {
        "reward": (reward_loss, padded, once),
        "dpo": (dpo_loss, padded_policy, once_policy),
    }


def measure(recipe: Path, count: int) -> dict[str, dict[str, float]]:
    """Medians over the batches, the first of each left out."""
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        root = Path(folder)
        prepared(recipe, root)
        tokenizer = load_tokenizer(root / "data/tokenizer")
        stage = Stage("reward", SECTIONS, INPUTS, root)
        pairs = read_pairs(stage, "train", tokenizer)
        given = list(batches(pairs, stage, tokenizer.pad_token_id, count + 1))
        for name, (loss_of, padded, once) in models(stage, tokenizer).items():
            taken = [
                [cpu_seconds(each, loss_of, batch) for each in (padded, once)] for batch in given
            ]
            result[name] = {
                "padded_seconds": statistics.median(theirs for theirs, _ in taken[1:]),
                "once_seconds": statistics.median(ours for _, ours in taken[1:]),
                "ratio": statistics.median(ours / theirs for theirs, ours in taken[1:]),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward and backward over preference pairs.")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.recipe, options.batches)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, found in result.items():
        print(
            f"{name:6} padded {1e3 * found['padded_seconds']:.0f} ms, pairs read once "
            f"{1e3 * found['once_seconds']:.0f} ms: {found['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
