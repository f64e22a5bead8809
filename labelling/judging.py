"""Pairs of replies that an evaluation kept, for people to judge the aligned model.

evaluation/samples.jsonl -> data/judge/pairs.jsonl
"""

import json
from pathlib import Path

from config import jsonl
from config.atomic_file import write_atomically
from config.errors import DataError
from labelling.votes import Pair, is_prompt

SAMPLES = Path("evaluation/samples.jsonl")
JUDGE_PAIRS = Path("data/judge/pairs.jsonl")


def evaluated_pairs(root: Path) -> int:
    """Write the pairs of the newest evaluation whose replies differ; returns how many. The page
    shows each on a side that a coin decides. Raises DataError if there is no evaluation.
    """
    if not (root / SAMPLES).exists():
        raise DataError(f"{SAMPLES} is not there: run the pipeline first, rlhf run.")
    pairs = []
    for row in jsonl.plain(root / SAMPLES):
        prompt = row.get("messages") or row["prompt"]
        sft, aligned = row["sft"], row["aligned"]
        if is_prompt(prompt) and sft.strip() and aligned.strip() and sft != aligned:
            pairs.append(Pair(prompt, sft, aligned))
    lines = [
        json.dumps(
            {"prompt": pair.prompt, "response1": pair.response1, "response2": pair.response2},
            ensure_ascii=False,
        )
        for pair in pairs
    ]
    (root / JUDGE_PAIRS).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(root / JUDGE_PAIRS, "".join(line + "\n" for line in lines))
    return len(pairs)
