"""How well the demo's recipe learns worlds that it was not tuned on.

    python benchmarks/worlds.py --seed 7 --worlds 10 [--json]

Draws worlds from the helpdesk family (other items, problems, wordings, facts to repeat, lengths and vocabularies), and
runs the stages of recipes/demo.yaml on each, with nothing changed but `data.source.world`. Reports each world and the
distribution. What a stage has finished is kept under .bench/worlds and not computed again by the same code and recipe;
a run that was stopped goes on.

sft_gold, ppo_gold  mean gold score of sampled replies to held-out prompts
data_gold           that of the demonstrations
reward_accuracy     expected accuracy of the reward model on the held-out pairs, under the known
                    probabilities of their labels
bayes_accuracy      that of the gold score itself: no reward model is better
gap_closed          (ppo_gold - sft_gold) / (1 - sft_gold)
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from config.methods.registry import stage_module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also as a script: the code beside it

from config import jsonl  # noqa: E402
from config.compose import compose  # noqa: E402
from config.load import read, validate, write  # noqa: E402
from config.schema import Params  # noqa: E402
from config.sections.data import SENTENCE_VOCABULARY, HelpdeskSource  # noqa: E402
from config.stage_code import stage_code  # noqa: E402

RECIPE = "recipes/demo.yaml"
STAGES = ("data", "sft", "reward", "ppo", "evaluate")
LARGEST_VOCABULARY = 300
FIGURES = ("sft_gold", "data_gold", "reward_accuracy", "bayes_accuracy", "ppo_gold")
WORST = {"sft_behind_demonstrations": max, "reward_behind_bayes": max, "gap_closed": min}
"""What a distribution is reported of, and which end of it is the worst."""


def drawn_shape(seed: int) -> dict[str, int]:
    """Size of a world of the family."""
    rng = random.Random(f"shape {seed}")
    items, facts = rng.randint(4, 20), rng.randint(0, 3)
    shape = {
        "seed": seed,
        "items": items,
        "problems": rng.randint(3, 8),
        "wordings": rng.randint(2, 4),
        "facts": facts,
        "fact_values": rng.randint(6, 16),
        "fact_words": rng.randint(1, 2),
        "sentence_words": rng.randint(3, 6),
    }
    named = items + (shape["fact_values"] + 2 * facts if facts else 0) + 3
    return shape | {"vocabulary": rng.randint(named + SENTENCE_VOCABULARY, LARGEST_VOCABULARY)}


def world_seeds(seed: int, worlds: int) -> list[int]:
    """Seeds of fresh worlds: the first of more are the same."""
    rng = random.Random(f"worlds {seed}")
    return [rng.randrange(10_000, 1_000_000) for _ in range(worlds)]


def world_params(recipe: str, seed: int) -> Params:
    """The recipe on another world."""
    content = compose(read(ROOT / recipe), {"data": {"source": {"world": drawn_shape(seed)}}})
    return validate(content, recipe)


def folder_of(params: Params, parent: Path) -> Path:
    """A folder of these params and this code."""
    code = {stage: stage_code(ROOT, stage) for stage in STAGES}
    what = json.dumps([params.model_dump(mode="json"), code], sort_keys=True)
    return parent / hashlib.sha256(what.encode()).hexdigest()[:16]


def run_stages(folder: Path, params: Params) -> dict[str, float]:
    """Seconds of each stage, whenever that ran."""
    for name in ("metrics", "plots"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(params, folder / "params.yaml")
    kept = folder / "seconds.json"
    seconds: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    for stage in STAGES:
        if stage in seconds:
            continue
        begin = time.monotonic()
        with (folder / f"{stage}.log").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, "-m", stage_module(stage), stage],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
        if done.returncode:
            sys.exit(f"training.{stage} ended with exit code {done.returncode}: see {log.name}")
        seconds[stage] = time.monotonic() - begin
        kept.write_text(json.dumps(seconds), encoding="utf-8")
    return seconds


def expected_accuracy(folder: Path, params: Params) -> float:
    """How often the reward model's preference would be the label's, were the labels of the held-out pairs drawn
    again.
    """
    from training.modeling.models import load_reward_model
    from training.modeling.scoring import raw_scores
    from training.modeling.tokenizer import encode_prompts, encode_responses, load_tokenizer
    from training.worlds.helpdesk import gold_score, preference_probability
    from training.worlds.world import world_of

    source = params.data.source
    assert isinstance(source, HelpdeskSource)
    tokenizer = load_tokenizer(folder / "data/tokenizer")
    model = load_reward_model(folder / "models/reward", params.model, tokenizer).eval()
    pairs = list(jsonl.plain(folder / "data/prepared/preference/test.jsonl"))
    prompts = encode_prompts(tokenizer, [pair["prompt"] for pair in pairs])
    world, scores, golds = world_of(source), [], []
    for side in ("chosen", "rejected"):
        replies = encode_responses(tokenizer, [pair[side] for pair in pairs])
        sequences = [a + b for a, b in zip(prompts, replies, strict=True)]
        scores.append(raw_scores(model, sequences, 4096).tolist())
        golds.append([gold_score(pair["prompt"], pair[side], world) for pair in pairs])
    total = 0.0
    for *by_scores, gold_a, gold_b in zip(*scores, *golds, strict=True):
        p = preference_probability(gold_a, gold_b, source.temperature)
        total += p if by_scores[0] > by_scores[1] else 1 - p
    return total / len(pairs)


def measure(recipe: str, seed: int, parent: Path) -> dict[str, Any]:
    """The figures of one world."""
    params = world_params(recipe, seed)
    folder = folder_of(params, parent)
    seconds = run_stages(folder, params)
    kept = folder / "world.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    data, evaluation = (
        json.loads((folder / f"metrics/{name}.json").read_text(encoding="utf-8")) for name in ("data", "evaluate")
    )
    sft_gold, ppo_gold = evaluation["gold_sft"], evaluation["gold_aligned"]
    row = {
        "seed": seed,
        "sft_gold": sft_gold,
        "data_gold": data["gold_sft_mean"],
        "reward_accuracy": expected_accuracy(folder, params),
        "bayes_accuracy": data["bayes_accuracy"],
        "ppo_gold": ppo_gold,
        "right_item_rate": evaluation["right_item_rate"],
        "gap_closed": (ppo_gold - sft_gold) / (1 - sft_gold),
        "seconds": sum(seconds.values()),
        "shape": drawn_shape(seed),
    }
    row |= {
        "sft_behind_demonstrations": row["data_gold"] - row["sft_gold"],
        "reward_behind_bayes": row["bayes_accuracy"] - row["reward_accuracy"],
    }
    kept.write_text(json.dumps(row), encoding="utf-8")
    return row


def distribution(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst of what the worlds are judged by."""
    return {
        name: {"median": statistics.median(row[name] for row in rows), "worst": worst(row[name] for row in rows)}
        for name, worst in WORST.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which worlds are drawn")
    parser.add_argument("--worlds", type=int, default=10)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.worlds < 1:
        parser.error(f"--worlds {options.worlds}: at least 1")
    rows = []
    for number, seed in enumerate(world_seeds(options.seed, options.worlds), start=1):
        rows.append(measure(options.recipe, seed, ROOT / ".bench/worlds"))
        shown = " ".join(f"{name} {rows[-1][name]:.3f}" for name in (*FIGURES, "gap_closed"))
        print(
            f"{number}/{options.worlds} world {seed}: {shown} ({rows[-1]['seconds']:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    result = distribution(rows)
    if options.json:
        print(json.dumps({"seed": options.seed, "worlds": rows, **result}, indent=2))
        return
    for name, of in result.items():
        print(f"{name}: median {of['median']:.3f}, worst {of['worst']:.3f}")


if __name__ == "__main__":
    main()
