"""Time and memory of the stages by the number of rows: is the data stage linear in time and flat in memory, and do the
others start on many rows with no more memory than on few?

    python -m benchmarks.data_at_size --rows 200000 --json
    python -m benchmarks.data_at_size --rows 1000000 --row-bytes 2100 --stages data

It writes a file of generated preference pairs, prepares a quarter, a half and all of them with `python -m
training.data`, and takes two steps of SFT and of the reward model on each.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.projects.checkouts import ROOT
from benchmarks.projects.processes import stage_process
from config import jsonl
from config.compose import compose
from config.load import read, validate, write
from config.records import UsageRow

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("an", "elo", "iru", "ost")]
PARTS = (0.25, 0.5, 1.0)
STEPS = 2


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + "."


def write_pairs(path: Path, rows: int, row_bytes: int) -> None:
    rng, words = random.Random(1), row_bytes // 15
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            row = {
                "prompt": f"{sentence(rng, words)} number {number}?",
                "chosen": sentence(rng, rng.randint(words // 2, 2 * words)),
                "rejected": sentence(rng, rng.randint(words // 2, 2 * words)),
            }
            file.write(json.dumps(row) + "\n")


def measured(folder: Path, stage: str) -> dict[str, float]:
    """Seconds of a stage's process, and the highest memory that it measured itself."""
    began = time.perf_counter()
    stage_process(folder, f"training.{stage}", {})
    seconds = time.perf_counter() - began
    rows = jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows
    return {"seconds": seconds, "mib": max(row.peak_bytes for row in rows) / 2**20}


def at_size(folder: Path, rows: int, row_bytes: int, names: Sequence[str]) -> dict[str, Any]:
    """The stages on so many pairs."""
    folder.mkdir()
    write_pairs(folder / "pairs.jsonl", rows, row_bytes)
    short = {"max_steps": STEPS, "checkpoint_every_steps": 10**6}
    changes = {
        "data": {
            "source": {"kind": "file", "path": "pairs.jsonl", "format": "pairs", "columns": {}},
            "vote_source": None,
        },
        "sft": short,
        "reward": short,
        "model": {"context_length": 32 + row_bytes // 2},
    }
    params = validate(compose(read(ROOT / "recipes/demo.yaml"), changes), "the benchmark")
    write(params, folder / "params.yaml")
    stages = {stage: measured(folder, stage) for stage in names}
    return {"rows": rows, "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--row-bytes", type=int, default=180, help="of the file, about")
    parser.add_argument("--stages", nargs="+", default=["data", "sft", "reward"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            rows = round(options.rows * part)
            sizes.append(at_size(Path(folder) / str(part), rows, options.row_bytes, options.stages))
            stages = sizes[-1]["stages"]
            line = ", ".join(f"{s} {m['seconds']:.1f} s {m['mib']:.0f} MiB" for s, m in stages.items())
            print(f"{sizes[-1]['rows']:,} pairs: {line}", file=sys.stderr)
    small, large = sizes[0]["stages"]["data"], sizes[-1]["stages"]["data"]
    rows = sizes[-1]["rows"] - sizes[0]["rows"]
    result = {
        "sizes": sizes,
        "seconds_per_1000_rows": 1000 * (large["seconds"] - small["seconds"]) / rows,
        "bytes_per_row": 2**20 * (large["mib"] - small["mib"]) / rows,
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"data: {result['seconds_per_1000_rows']:.3f} s and "
            f"{result['bytes_per_row']:.0f} kB for each further 1,000 pairs"
        )


if __name__ == "__main__":
    main()
