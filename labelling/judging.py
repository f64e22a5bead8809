"""Pairs of replies for people to judge: those of a contest that waits for them, else those that the newest evaluation
kept.

runs/retrain/<cycle>/replies.jsonl, evaluation/samples.jsonl -> data/judge/pairs.jsonl
"""

import json
from pathlib import Path

from config import jsonl
from config.atomic_file import write_atomically
from config.errors import DataError
from config.workspace.retraining import RETRAIN_FOLDER, RETRAIN_ROWS, RetrainRow
from labelling.votes import Pair, is_prompt

SAMPLES = Path("evaluation/samples.jsonl")
JUDGE_PAIRS = Path("data/judge/pairs.jsonl")
CONTEST, EVALUATION = ("champion", "challenger"), ("sft", "aligned")
"""Whose replies a file has, by its columns."""


def pairs_to_judge(root: Path) -> int:
    """Write the pairs whose replies differ; returns how many. The page shows each on a side that a coin decides.
    Raises DataError if there is neither a contest nor an evaluation.
    """
    waiting = waiting_contest(root)
    file, sides = (waiting, CONTEST) if waiting is not None else (root / SAMPLES, EVALUATION)
    if not file.exists():
        raise DataError(f"{SAMPLES} is not there: run the pipeline first, rlhf run.")
    pairs = []
    for row in jsonl.plain(file):
        prompt = row.get("messages") or row["prompt"]
        first, second = (row[side] for side in sides)
        if is_prompt(prompt) and first.strip() and second.strip() and first != second:
            pairs.append(Pair(prompt, first, second))
    lines = [
        json.dumps(
            {"prompt": pair.prompt, "response1": pair.response1, "response2": pair.response2}, ensure_ascii=False
        )
        for pair in pairs
    ]
    (root / JUDGE_PAIRS).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(root / JUDGE_PAIRS, "".join(line + "\n" for line in lines))
    return len(pairs)


def waiting_contest(root: Path) -> Path | None:
    """The replies of the last retrain cycle, if it waits for people's votes."""
    rows = jsonl.read(root / RETRAIN_ROWS, RetrainRow).rows if (root / RETRAIN_ROWS).exists() else []
    ended = [row for row in rows if row.event == "end" and row.outcome != "skipped"]
    if not ended or ended[-1].outcome != "waiting":
        return None
    return root / RETRAIN_FOLDER / ended[-1].cycle / "replies.jsonl"
