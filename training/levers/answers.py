"""Replies of one policy to the held-out prompts, scored: `python -m training.levers.answers`.

The current folder is laid out as a project: params.yaml, data/, models/sft, models/reward (the
judge) and the policy. One JSON file comes out; config/workspace/levers.py has its form.

--best-of N answers with the SFT model instead, N times each, and keeps the reply that the reward
model prefers: alignment without training. The KL of best-of-n is log n - (n - 1) / n, an upper
bound. Source: Beirami et al. 2024 (arXiv:2401.01879), theorem 1.

--rollouts FILE also scores what the policy sampled while it learned (training/rollout/samples.py),
by the gold score where the world has one.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from config import jsonl
from config.load import load
from config.schema import Params
from training.inference.replies import Replies, answer
from training.inference.trained_models import TrainedModels
from training.modeling.tokenizer import Prompt, prompt_text
from training.preparation.helpdesk import gold_score, known_world
from training.preparation.prompts import held_out_prompts
from training.preparation.worlds import World
from training.process.artifacts import write_json
from training.process.command import run_command

REPLIES = 4
"""Replies per prompt: the sampling noise of a mean over prompts is then half of that with one."""


def scored(
    models: TrainedModels, prompts: Sequence[Prompt], params: Params, role: Any, repeats: int
) -> dict[str, Any]:
    """`repeats` replies to each prompt, one prompt after the other, with the scores of both
    judges.
    """
    asked = [prompt for prompt in prompts for _ in range(repeats)]
    replies: Replies = answer(models, asked, params, role)
    rewards = models.scores(asked, replies.texts, replies.ended)
    models.release()
    world = known_world(params.data.source, map(prompt_text, prompts))
    return {
        "replies": repeats,
        "golds": golds(asked, replies.texts, world),
        "rewards": rewards,
        "kl": fmean(replies.kl),
        "chars": fmean(replies.chars),
    }


def golds(
    prompts: Sequence[Prompt], texts: Sequence[str], world: World | None
) -> list[float] | None:
    """Gold score of each reply, None if the world has none."""
    if world is None:
        return None
    pairs = zip(prompts, texts, strict=True)
    return [gold_score(prompt_text(prompt), text, world) for prompt, text in pairs]


def best_of(found: dict[str, Any], n: int) -> dict[str, Any]:
    """One reply of every n: the one with the highest reward."""
    rewards, gold = found["rewards"], found["golds"]
    kept = [
        max(range(start, start + n), key=rewards.__getitem__) for start in range(0, len(rewards), n)
    ]
    return {
        "n": n,
        "replies": found["replies"] // n,
        "golds": None if gold is None else [gold[i] for i in kept],
        "rewards": [rewards[i] for i in kept],
        "kl": math.log(n) - (n - 1) / n,
    }


def learning_curve(path: Path, params: Params) -> list[dict[str, float]]:
    """Mean, standard deviation and number of the scores of each update's responses, by the gold
    score or, where there is none, the reward model. A repeated update counts once.
    """
    by_update: dict[int, dict[int, Any]] = {}
    for row in jsonl.plain(path):
        by_update.setdefault(row["step"], {})[row["index"]] = row
    prompts = {row["prompt"] for rows in by_update.values() for row in rows.values()}
    world = known_world(params.data.source, prompts)
    curve = []
    for update, by_index in sorted(by_update.items()):
        rows = list(by_index.values())
        scores = golds([r["prompt"] for r in rows], [r["response"] for r in rows], world)
        scores = scores if scores is not None else [row["score"] for row in rows]
        spread = stdev(scores) if len(scores) > 1 else 0.0
        curve.append({"update": update, "mean": fmean(scores), "std": spread, "n": len(scores)})
    return curve


@torch.no_grad()
def main(options: argparse.Namespace) -> None:
    root = Path()
    params = load(root / "params.yaml")
    models = TrainedModels(root)
    prompts = held_out_prompts(root, params, models.tokenizer)
    if options.best_of:
        found = scored(models, prompts, params, "sft", options.best_of)
        sizes = [2**i for i in range(options.best_of.bit_length()) if 2**i <= options.best_of]
        content: dict[str, Any] = {"best_of": [best_of(found, n) for n in sizes]}
    else:
        content = scored(models, prompts, params, options.role, REPLIES)
    if options.rollouts is not None:
        content["curve"] = learning_curve(options.rollouts, params)
    write_json(options.out, content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer the held-out prompts and score that.")
    parser.add_argument("--role", choices=("policy", "sft"), default="policy")
    parser.add_argument("--best-of", type=int, default=0)
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    sys.exit(run_command(lambda: main(given)))
