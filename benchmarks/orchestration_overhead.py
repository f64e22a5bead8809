"""What orchestration costs: the flow beside the bare stage processes of the same recipe.

    python benchmarks/orchestration_overhead.py [--runs 3] [--json]

In a checkout of its own, over the tiny recipe of the end-to-end tests; every stage is computed anew each time. In
turns:

bare       `python -m training.STAGE`, one after the other
running    `rlhf run` with the servers of `rlhf up`: plan, DVC, Prefect, MLflow and the report come
           on top
temporary  `rlhf run` with the temporary Prefect server that it starts itself

On a shared machine the stages themselves differ by more than what is looked for, so the time that the stages account
for in their own rows is taken off, on both sides: overhead = (wall - rows) of the flow - (wall - rows) of the bare
processes. Medians over the runs. Other work on the cores stretches that too; what it cannot change much is the
processor time, flow less bare, which is shown beside it. Exit code 1 if the overhead is above its limit.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from config.methods.registry import stage_module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also as a script: the code beside it

from benchmarks.projects.checkouts import checkout, point_remote  # noqa: E402
from config import jsonl  # noqa: E402
from config.load import load, write  # noqa: E402
from config.records import RUN_ID_VARIABLE, UsageRow, stages_of  # noqa: E402

STAGES = stages_of("ppo")
SECONDS_PER_STAGE = 2.0
SECONDS_PER_RUN = {"running": 5.0, "temporary": 15.0}
TIMEOUT_SECONDS = 900.0


class Timing(NamedTuple):
    """All stages once."""

    wall_seconds: float
    rows_seconds: float
    """What the stages account for themselves: from the start of each process to its last row."""
    cpu_seconds: float
    """Processor time of all processes that were waited for; that of the servers of `rlhf up` is not in it."""

    @property
    def rest_seconds(self) -> float:
        return self.wall_seconds - self.rows_seconds


class Overhead(NamedTuple):
    """Of one way to run the flow."""

    seconds: float
    limit_seconds: float
    cpu_seconds: float

    @property
    def kept(self) -> bool:
        return self.seconds <= self.limit_seconds


def overhead(way: str, flow: list[Timing], bare: list[Timing]) -> Overhead:
    """Median rest of the flow less that of the bare processes, and what is allowed."""
    seconds = statistics.median(each.rest_seconds for each in flow) - statistics.median(
        each.rest_seconds for each in bare
    )
    cpu_seconds = statistics.median(each.cpu_seconds for each in flow) - statistics.median(
        each.cpu_seconds for each in bare
    )
    return Overhead(seconds, SECONDS_PER_RUN[way] + SECONDS_PER_STAGE * len(STAGES), cpu_seconds)


def timed(root: Path, seed: int, commands: list[list[str]]) -> Timing:
    """Run Python with each of the argument lists, with params that no run had before."""
    write(load(root / "params.yaml", [f"seed={seed}"]), root / "params.yaml")
    before, cpu = rows_seconds(root), cpu_seconds()
    began = time.monotonic()
    for arguments in commands:
        python(root, *arguments)
    return Timing(time.monotonic() - began, rows_seconds(root) - before, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows_seconds(root: Path) -> float:
    return sum(
        row.seconds for stage in STAGES for row in jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows
    )


def python(root: Path, *arguments: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        RUN_ID_VARIABLE: "benchmark",
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def measure(root: Path, runs: int, ports: list[str]) -> dict[str, list[Timing]]:
    """The three ways, after one run of each kind that warms the file cache and makes the databases."""
    bare = [["-m", stage_module(stage), stage] for stage in STAGES]
    flow = [["-m", "cli.main", "run", "--json"]]
    seeds = iter(range(1000, 10_000))
    found: dict[str, list[Timing]] = {"bare": [], "temporary": [], "running": []}
    timed(root, next(seeds), flow)
    for _ in range(runs):
        found["bare"].append(timed(root, next(seeds), bare))
        found["temporary"].append(timed(root, next(seeds), flow))
    python(root, "-m", "cli.main", "up", *ports)
    try:
        for _ in range(runs):
            found["running"].append(timed(root, next(seeds), flow))
    finally:
        python(root, "-m", "cli.main", "down")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prefect-port", default="4261")
    parser.add_argument("--mlflow-port", default="5061")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-overhead-") as folder:
        ports = ["--prefect-port", chosen.prefect_port, "--mlflow-port", chosen.mlflow_port]
        root = checkout(Path(folder) / "checkout")
        point_remote(root, str(Path(folder) / "remote"))
        write(load(ROOT / "tests" / "e2e" / "tiny.yaml"), root / "params.yaml")
        found = measure(root, chosen.runs, ports)
    results = {way: overhead(way, found[way], found["bare"]) for way in SECONDS_PER_RUN}
    if chosen.json:
        timings = {way: [each._asdict() for each in timings] for way, timings in found.items()}
        print(
            json.dumps(
                {"timings": timings, "overhead": {way: result._asdict() for way, result in results.items()}}, indent=2
            )
        )
    for way, result in results.items():
        if not chosen.json:
            allowed = f"{len(STAGES)} stages, at most {result.limit_seconds:.0f} s"
            print(f"{way:<10} {result.seconds:5.1f} s over {allowed}; {result.cpu_seconds:.1f} s of processor time")
    return 0 if all(result.kept for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
