"""The figures of the demo recipe: time of the whole pipeline and of reruns, quality of every stage, over several
seeds.

    python benchmarks/demo_figures.py [--seeds 1 2 3] [--recipe recipes/demo.yaml] [--json]

Each seed runs in a clone of its own (with this checkout's committed code), so nothing is reused and no file of yours
is touched.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.projects.checkouts import clone, point_remote
from config.ports import free_port

EVALUATED = (
    "gold_base",
    "gold_sft",
    "gold_aligned",
    "right_item_rate_sft",
    "right_item_rate",
    "win_rate_gold",
    "win_rate_gold_low",
    "win_rate_gold_high",
    "win_rate_reward",
    "win_rate_reward_low",
    "win_rate_reward_high",
    "kl",
    "reward_hacking",
)
"""Of metrics/evaluate.json."""
RLHF = Path(sys.executable).with_name("rlhf")


def rlhf(folder: Path, *arguments: str) -> tuple[float, str]:
    """Wall seconds and standard output of an rlhf command run in `folder`."""
    begin = time.monotonic()
    done = subprocess.run(
        [RLHF, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"rlhf {' '.join(arguments)} ended with exit code {done.returncode} in {folder}")
    return time.monotonic() - begin, done.stdout


def cloned(parent: Path, seed: int) -> Path:
    """A clone of this checkout with a DVC remote of its own."""
    folder = clone(parent / f"seed-{seed}")
    point_remote(folder, str(parent / "remote"))
    return folder


def measure(folder: Path, recipe: str, seed: int, reruns: bool) -> dict[str, Any]:
    """One seed's figures; with `reruns` those of the unchanged pipeline too."""
    run = ("run", "--recipe", recipe, "--set", f"seed={seed}", "--json")
    seconds, output = rlhf(folder, *run)
    reward, evaluation = (
        json.loads((folder / f"metrics/{name}.json").read_text(encoding="utf-8")) for name in ("reward", "evaluate")
    )
    limit = reward["bayes_accuracy"]
    figures: dict[str, Any] = {
        "seed": seed,
        "seconds": seconds,
        "stage_seconds": {stage["stage"]: stage["seconds"] for stage in json.loads(output)["stages"]},
        "reward_accuracy": reward["accuracy"],
        "bayes_accuracy": limit,
        "gap_to_bayes": None if limit is None else limit - reward["accuracy"],
        "ece": reward["ece"],
        **{name: evaluation[name] for name in EVALUATED},
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)
    if reruns:
        figures |= rerun_figures(folder, run)
    return figures


def rerun_figures(folder: Path, run: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of the same run again: unchanged, with another price, beside servers."""
    figures: dict[str, Any] = {}
    figures["rerun_seconds"] = rlhf(folder, *run)[0]
    figures["price_change_seconds"], after = rlhf(folder, *run, "--set", "prices.usd_per_device_hour=0.2")
    figures["price_change_trains"] = [stage["stage"] for stage in json.loads(after)["stages"] if not stage["cached"]]
    prefect_port, mlflow_port = str(free_port()), str(free_port())
    rlhf(folder, "up", "--prefect-port", prefect_port, "--mlflow-port", mlflow_port)
    try:
        figures["rerun_with_server_seconds"] = rlhf(folder, *run)[0]
    finally:
        rlhf(folder, "down")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        rows = [
            measure(cloned(Path(parent), seed), options.recipe, seed, reruns=position == 0)
            for position, seed in enumerate(options.seeds)
        ]
    machine = f"{os.cpu_count()} x {platform.processor() or platform.machine()}"
    if options.json:
        print(json.dumps({"machine": machine, "runs": rows}, indent=2))
        return
    print(f"machine: {machine}\n")
    names = [name for name in rows[0] if name != "stage_seconds"]
    for name in names:
        print(f"| {name} | " + " | ".join(_shown(row.get(name)) for row in rows) + " |")
    for stage in rows[0]["stage_seconds"]:
        print(f"| {stage} seconds | " + " | ".join(_shown(row["stage_seconds"][stage]) for row in rows) + " |")


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
