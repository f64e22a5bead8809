"""Compares variants with the baseline: `python -m training.levers.compare STUDY.json --out FILE`.

The quality of a reply is its gold score. Where the world has none it is whether the baseline's
reward model prefers it to the SFT model's replies to the same prompt. Variants are compared prompt
by prompt, and with three or more seeds seed by seed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from training.evaluation.comparison import Gain, gain
from training.process.artifacts import write_json

FEWEST_SEEDS = 3
"""Seeds from which the interval is over seeds, which vary more than prompts."""

Answers = dict[str, Any]


def qualities(answers: Answers, sft: Answers) -> list[float]:
    """Mean quality of the replies to each prompt."""
    own = _by_prompt(answers, answers["golds"] or answers["rewards"])
    if answers["golds"] is not None:
        return [fmean(scores) for scores in own]
    others = _by_prompt(sft, sft["rewards"])
    return [
        fmean((a > b) + 0.5 * (a == b) for a in replies for b in against)
        for replies, against in zip(own, others, strict=True)
    ]


def _by_prompt(answers: Answers, scores: Sequence[float]) -> list[Sequence[float]]:
    n = answers["replies"]
    return [scores[start : start + n] for start in range(0, len(scores), n)]


def paired(ours: list[list[float]], theirs: list[list[float]], confidence: float) -> Gain:
    """Mean difference of qualities, [seed][prompt], and its interval."""
    if len(ours) >= FEWEST_SEEDS:
        return gain([fmean(each) for each in ours], [fmean(each) for each in theirs], confidence)
    flat = [[x for seed in each for x in seed] for each in (ours, theirs)]
    return gain(flat[0], flat[1], confidence)


def compared(study: dict[str, Any]) -> dict[str, Any]:
    """Quality and difference to the baseline of every variant, each with its interval."""
    sft = [_read(path) for path in study["sft"]]
    quality = {
        name: [qualities(_picked(path), base) for path, base in zip(paths, sft, strict=False)]
        for name, paths in study["variants"].items()
    }
    confidence = study["confidence"]
    found = {}
    for name, own in quality.items():
        zeros = [[0.0] * len(each) for each in own]
        alone = paired(own, zeros, confidence)
        beside = paired(own, quality[study["baseline"]][: len(own)], confidence)
        kls = [_picked(path)["kl"] for path in study["variants"][name]]
        found[name] = {
            "quality": alone.mean, "quality_low": alone.low, "quality_high": alone.high,
            "difference": beside.mean, "difference_low": beside.low,
            "difference_high": beside.high, "kl": fmean(kls),
        }  # fmt: skip
    return {"judge": "gold" if sft[0]["golds"] is not None else "win_rate", "variants": found}


def _read(path: str) -> Answers:
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _picked(path: str) -> Answers:
    """The answers in a file; with suffix `#n` those of best-of-n."""
    file, _, n = path.partition("#")
    content = _read(file)
    return content if not n else next(x for x in content["best_of"] if x["n"] == int(n))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the variants of a study.")
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    write_json(given.out, compared(json.loads(given.study.read_text(encoding="utf-8"))))
    sys.exit(0)
