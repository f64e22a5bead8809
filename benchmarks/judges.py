"""How often judges agree with human votes that nothing trained on.

    rlhf fetch minilm
    python -m benchmarks.judges --votes testset-v1.json --json
    python -m benchmarks.judges --votes testset-v1.json --url http://127.0.0.1:8000/v1 --model M

The votes (as recipes/votes-cpu.yaml reads them) are split by prompt: --learn of them for judges that learn, TEST to
judge them on, the rest for the SFT model that the judge's own reward model starts from. Answers of an endpoint are
kept under --work: a measurement that was stopped goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.projects.checkouts import ROOT
from config.load import load, write
from training.judging.judge import Judge, verdicts
from training.judging.verdict import agreement_metrics, agreement_with_people, chosen, human_pairs

TEST = 0.35


def prepared(work: Path, votes: Path, learn: float, judge: dict[str, Any]) -> Any:
    """Params, and the votes in data/prepared of the folder `work`."""
    fixed = [f"data.source.path={votes.resolve()}", f"data.judge_fraction={learn}",
             f"data.test_fraction={TEST}", "data.max_quarantine_fraction=0.5",
             f"evaluate.judge={json.dumps(judge)}"]  # fmt: skip
    params = load(ROOT / "recipes" / "votes-cpu.yaml", fixed)
    work.mkdir(parents=True, exist_ok=True)
    write(params, work / "params.yaml")
    result = {"data": "data/prepared/preference/judge.jsonl", "sft": "models/sft/config.json"}
    for stage, output in result.items():
        if not (work / output).exists():
            command = [sys.executable, "-m", f"training.{stage}"]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, cwd=work, check=True, env=environment, capture_output=True)
    return params


def measured(work: Path, params: Any, most: int | None) -> dict[str, Any]:
    """Agreement of the judge of `params`, its seconds, and what it was paid."""
    began = time.perf_counter()
    judge: Judge = chosen(work, work, params, lambda tokens, usd: None)
    pairs = human_pairs(work, "test")[:most]
    result = agreement_with_people(verdicts(judge, pairs), pairs, params.evaluate.confidence, 1)
    seconds = time.perf_counter() - began
    return agreement_metrics(judge, result) | {"seconds": seconds, "usd": judge.usd}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--votes", type=Path, required=True, help="human votes, such as PandaLM's")
    parser.add_argument("--learn", type=float, default=0.45, help="share of prompts to learn from")
    parser.add_argument("--encoder", default=str(ROOT / "models/judge/minilm"))
    parser.add_argument("--reward-model", help="folder or hub id")
    parser.add_argument("--url", help="of an OpenAI-compatible endpoint, with /v1")
    parser.add_argument("--model", default="model", help="its name there")
    parser.add_argument("--key-variable", help="environment variable with its key")
    parser.add_argument("--only", help="one kind of judge: embedding, reward_model, endpoint")
    parser.add_argument("--pairs", type=int, help="judge on so many pairs (default: all)")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench" / "judges")
    parser.add_argument("--json", action="store_true", help="print JSON, not lines")
    options = parser.parse_args()
    judges: list[dict[str, Any]] = [
        {"kind": "embedding", "path": options.encoder},
        {"kind": "reward_model", "path": None},
    ]
    if options.reward_model:
        judges.append({"kind": "reward_model", "path": options.reward_model})
    if options.url:
        judges.append({
            "kind": "endpoint", "url": options.url, "model": options.model,
            "key_variable": options.key_variable,
            "usd_per_million_prompt_tokens": 0.0, "usd_per_million_reply_tokens": 0.0,
            "max_usd": None, "parallel": 4, "timeout_seconds": 120.0,
        })  # fmt: skip
    rows = []
    for judge in judges:
        if options.only not in (None, judge["kind"]):
            continue
        params = prepared(options.work, options.votes, options.learn, judge)
        rows.append(measured(options.work, params, options.pairs))
        if not options.json:
            row = rows[-1]
            print(
                f"{row['judge']}: {row['judge_accuracy']:.3f} ({row['judge_accuracy_low']:.3f} to "
                f"{row['judge_accuracy_high']:.3f}) of {row['judge_pairs']} pairs, longer reply "
                f"{row['judge_longer_wins']:.3f}, where the shorter is better "
                f"{row['judge_accuracy_shorter']:.3f}, flips {row['position_flip_rate']:.3f}, "
                f"{row['seconds']:.0f} s; {row['judge_fault'] or 'its verdict counts'}",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
