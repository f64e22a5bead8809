"""How long a stage takes beside other processes that want the cores, against alone, by how its
threads wait for each other.

    python -m benchmarks.neighbours [--stage reward] [--busy N] [--runs 3] [--rows 3000] [--json]
    [--waiting spinning default ...]

Prepares the demo with fewer rows once, then runs the stage alone and beside N busy processes (as
many as there are cores), each way of waiting in turn:

default   as a stage runs where nothing is set: training/__init__.py has it wait passively
spinning  GOMP_SPINCOUNT=300000, what libgomp does where nothing is set: a thread that waits keeps
          its core for some milliseconds, though the thread it waits for may need it
NUMBER    GOMP_SPINCOUNT=NUMBER

Seconds are those of the training steps and, in brackets, those of the whole process. `beside` is
over the same way alone, `alone` over `spinning` alone, if that is among them; both are medians of
ratios within a round, as other work on the machine comes and goes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from config import jsonl
from config.load import load, write
from config.methods.registry import stage_module
from config.records import UsageRow
from training.process.launch import usable_cores

ROOT = Path(__file__).resolve().parent.parent
SPINNING = "spinning"
DEFAULT = "default"
LIBGOMPS_SPINCOUNT = "300000"
UPDATES = 4
"""Of PPO; the other stages go over their rows once."""
BEFORE = {"sft": ("data",), "reward": ("data", "sft"), "dpo": ("data", "sft"),
          "ppo": ("data", "sft", "reward")}  # fmt: skip
MEASURED = ("train", "rollout", "score", "reference", "value", "update")


def small(rows: int) -> list[str]:
    """What makes the demo's stages short: so many rows of each kind, once."""
    counted = (f"data.source.{kind}_rows={rows}" for kind in ("sft", "preference", "prompt"))
    once = (f"{stage}.epochs=1.0" for stage in ("sft", "reward", "dpo"))
    return [*counted, *once, f"ppo.updates={UPDATES}"]


class Took(NamedTuple):
    steps_seconds: float
    process_seconds: float


def environment(waiting: str) -> dict[str, str]:
    """What a process inherits, with the way of waiting."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    spins = {DEFAULT: None, SPINNING: LIBGOMPS_SPINCOUNT}.get(waiting, waiting)
    return inherited | ({} if spins is None else {"GOMP_SPINCOUNT": spins})


def stage_in(folder: Path, stage: str, waiting: str) -> Took:
    """Run a stage in `folder`."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", stage_module(stage), stage],
        cwd=folder,
        env=environment(waiting) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{stage} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    seconds = time.monotonic() - began
    rows = jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows
    return Took(sum(row.seconds for row in rows if row.phase in MEASURED), seconds)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """That many processes that want a core all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(
    prepared: Path, stage: str, ways: Sequence[str], neighbours: int, runs: int
) -> dict[str, list[tuple[Took, Took]]]:
    """(alone, beside) of each round, by way of waiting."""
    found: dict[str, list[tuple[Took, Took]]] = {way: [] for way in ways}
    for _ in range(runs):
        for way in ways:
            pair = []
            for count in (0, neighbours):
                folder = prepared.parent / "run"
                shutil.copytree(prepared, folder)
                with busy(count):
                    pair.append(stage_in(folder, stage, way))
                shutil.rmtree(folder)
            found[way].append((pair[0], pair[1]))
    return found


def summary(found: dict[str, list[tuple[Took, Took]]]) -> dict[str, dict[str, float]]:
    """Medians and ratios by way of waiting."""
    result = {}
    for way, rounds in found.items():
        of_way = {
            "alone_seconds": statistics.median(alone.steps_seconds for alone, _ in rounds),
            "beside_seconds": statistics.median(beside.steps_seconds for _, beside in rounds),
            "alone_process_seconds": statistics.median(
                alone.process_seconds for alone, _ in rounds
            ),
            "beside_process_seconds": statistics.median(
                beside.process_seconds for _, beside in rounds
            ),
            "beside_ratio": statistics.median(
                beside.steps_seconds / alone.steps_seconds for alone, beside in rounds
            ),
            "beside_process_ratio": statistics.median(
                beside.process_seconds / alone.process_seconds for alone, beside in rounds
            ),
        }
        if SPINNING in found:
            of_way["alone_ratio"] = statistics.median(
                alone.steps_seconds / spinning.steps_seconds
                for (alone, _), (spinning, _) in zip(rounds, found[SPINNING], strict=True)
            )
        result[way] = of_way
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="A stage beside busy processes, against alone.")
    parser.add_argument("--stage", choices=sorted(BEFORE), default="reward")
    parser.add_argument("--busy", type=int, default=usable_cores())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--waiting", nargs="+", default=[SPINNING, DEFAULT])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        prepared = Path(folder) / "prepared"
        prepared.mkdir()
        write(load(ROOT / "recipes" / "demo.yaml", small(options.rows)), prepared / "params.yaml")
        for stage in BEFORE[options.stage]:
            stage_in(prepared, stage, DEFAULT)
        load_before = os.getloadavg()[0]
        found = measure(prepared, options.stage, options.waiting, options.busy, options.runs)
    result = summary(found)
    if options.json:
        print(json.dumps({"stage": options.stage, "busy": options.busy, "cores": usable_cores(),
                          "load_before": load_before, "waiting": result}, indent=1))  # fmt: skip
        return
    print(f"{options.stage}: {usable_cores()} cores, {options.busy} busy, load {load_before:.1f}")
    for way, of_way in result.items():
        print(
            f"{way:9} alone {of_way['alone_seconds']:.1f} s ({of_way['alone_process_seconds']:.1f})"
            f", beside {of_way['beside_seconds']:.1f} s ({of_way['beside_process_seconds']:.1f}), "
            f"{of_way['beside_ratio']:.2f} times ({of_way['beside_process_ratio']:.2f})"
            + (
                f"; alone {of_way['alone_ratio']:.2f} of spinning"
                if "alone_ratio" in of_way
                else ""
            )
        )


if __name__ == "__main__":
    main()
