"""The demo's recipe with several seeds: what one seed shows may be luck.

    python -m benchmarks.demo_seeds --seeds 1 2 3 4 5 [--set section.key=value ...] [--json]

gold       mean gold score of the aligned model's sampled replies to held-out prompts
right      part of them that name the customer's item; in brackets before alignment
wins       part of the prompts whose reply has a higher gold score than the SFT model's, ties as a half
item pairs expected accuracy of the reward model on pairs of the best reply and the same with another item
seconds    of the stages' processes

What a stage has finished is kept under .bench/seeds and not computed again by the same code and recipe.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.worlds import RECIPE, ROOT, folder_of, run_stages
from config import jsonl
from config.compose import compose
from config.load import read, validate
from config.schema import Params


def item_accuracy(folder: Path, params: Params) -> float:
    """How often the reward model prefers the best reply to the same reply that names another item."""
    from training.modeling.models import load_reward_model
    from training.modeling.scoring import raw_scores
    from training.modeling.tokenizer import encode_prompts, encode_responses, load_tokenizer
    from training.worlds.helpdesk import read_case, reply
    from training.worlds.world import BY_HAND

    tokenizer = load_tokenizer(folder / "data/tokenizer")
    model = load_reward_model(folder / "models/reward", params.model, tokenizer).eval()
    rng = random.Random(0)
    prompts = [row["prompt"] for row in jsonl.plain(folder / "data/prepared/prompts/test.jsonl")]
    cases = [read_case(prompt) for prompt in prompts]
    others = [case._replace(item=rng.choice([item for item in BY_HAND.items if item != case.item])) for case in cases]
    right, wrong = (
        raw_scores(
            model,
            [
                a + b
                for a, b in zip(
                    encode_prompts(tokenizer, prompts),
                    encode_responses(tokenizer, [reply(case, 1.0, rng) for case in named]),
                    strict=True,
                )
            ],
            4096,
        )
        for named in (cases, others)
    )
    return float((right > wrong).float().mean())


def measure(seed: int, changes: list[str], parent: Path) -> dict[str, Any]:
    """The figures of one seed."""
    params = validate(compose(read(ROOT / RECIPE), {}, [*changes, f"seed={seed}"]), RECIPE)
    folder = folder_of(params, parent)
    seconds = run_stages(folder, params)
    evaluation = json.loads((folder / "metrics/evaluate.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        "gold_sft": evaluation["gold_sft"],
        "gold": evaluation["gold_aligned"],
        "right_item_sft": evaluation["right_item_rate_sft"],
        "right_item": evaluation["right_item_rate"],
        "wins": evaluation["win_rate_gold"],
        "item_pairs": item_accuracy(folder, params),
        "seconds": seconds,
        "folder": str(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes of the recipe")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        row = measure(seed, options.set, ROOT / ".bench/seeds")
        rows.append(row)
        print(
            f"seed {seed}: gold {row['gold']:.3f} ({row['gold_sft']:.3f}), right item {row['right_item']:.1%} "
            f"({row['right_item_sft']:.1%}), wins {row['wins']:.1%}, item pairs {row['item_pairs']:.1%}, "
            f"{sum(row['seconds'].values()):.0f} s",
            file=sys.stderr,
            flush=True,
        )
    if options.json:
        print(json.dumps(rows, indent=1))
    print(
        f"worst: gold {min(row['gold'] for row in rows):.3f}, right item {min(row['right_item'] for row in rows):.1%}"
    )


if __name__ == "__main__":
    main()
