"""People's votes on the replies of an evaluation: `rlhf label --judge` asks for them.

data/judge/votes.jsonl   prompt, response1, response2, annotator, vote: 1, 2, 0 a tie, null skipped
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from config import jsonl
from training.modeling.tokenizer import prompt_text


def votes_on(path: Path, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]) -> dict[int, float]:
    """Place of a prompt -> mean preference for `ours` of the people who voted on exactly these two replies; their last
    vote counts. Empty without the file.
    """
    if not path.exists():
        return {}
    places = {
        (prompt, frozenset(replies)): i for i, (prompt, *replies) in enumerate(zip(prompts, ours, theirs, strict=True))
    }
    said: dict[int, dict[str, float]] = {}
    for row in jsonl.plain(path):
        replies = (row.get("response1"), row.get("response2"))
        place = places.get((prompt_text(row["prompt"]), frozenset(map(str, replies))))
        if place is None or row.get("vote") not in (0, 1, 2):
            continue
        chosen = {0: None, 1: replies[0], 2: replies[1]}[row["vote"]]
        value = 0.5 if chosen is None else float(chosen == ours[place])
        said.setdefault(place, {})[json.dumps(row.get("annotator"))] = value
    return {place: fmean(votes.values()) for place, votes in sorted(said.items())}
