"""How far the plan of a recipe is off on this machine: in a clone of its own `rlhf calibrate`, then the whole run, and
every stage's planned time and memory beside the measured ones.

    python benchmarks/plan_accuracy.py [--recipes demo demo-distill] [--runs 3] [--write]

Each recipe is calibrated once and run with as many seeds as there are runs. smollm-cpu and smollm-distill fetch their
model first, and take half an hour a run. --write puts the intervals into costs/tables/checked_cpu.yaml.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.demo_figures import cloned, rlhf
from config.load import load
from config.workspace.machine import MACHINE_FILE
from config.workspace.timed import TIMED_FILE
from costs.planning.models import base_shape

ROOT = Path(__file__).parents[1]
CHECKED = ROOT / "costs" / "tables" / "checked_cpu.yaml"
COVERED = 0.85
"""Share of the measurements that an interval is to hold."""


class Compared(NamedTuple):
    """A stage of one run."""

    recipe: str
    seed: int
    stage: str
    seconds: tuple[float, float]
    """(measured, planned)."""
    peak_bytes: tuple[float, float] | None
    """The same; None of the data stage."""
    billions: float
    """Parameters of the model."""


def error(pair: tuple[float, float]) -> float:
    """Of the plan, relative to the measurement."""
    return pair[1] / pair[0] - 1


def runs_of(recipe: str, runs: int, parent: Path) -> list[Compared]:
    """Calibrate once, then run with each seed in a clone of its own."""
    path, result, calibration = f"recipes/{recipe}.yaml", list[Compared](), dict[Path, bytes]()
    for seed in range(1, runs + 1):
        folder = cloned(parent / recipe, seed)
        if recipe.startswith("smollm"):
            rlhf(folder, "fetch", "smollm2")
        if not calibration:
            rlhf(folder, "calibrate", "--recipe", path)
            calibration = {file: (folder / file).read_bytes() for file in (MACHINE_FILE, TIMED_FILE)}
        (folder / ".rlhf").mkdir(exist_ok=True)
        for file, content in calibration.items():
            (folder / file).write_bytes(content)
        rlhf(folder, "run", "--recipe", path, "--set", f"seed={seed}")
        _, output = rlhf(folder, "report", "--costs", "--json")
        size = base_shape(load(folder / "params.yaml"), folder).parameters / 1e9
        stages: list[dict[str, Any]] = json.loads(output)["stages"]
        result += [compared(recipe, seed, stage, size) for stage in stages]
    return result


def compared(recipe: str, seed: int, stage: dict[str, Any], billions: float) -> Compared:
    planned, measured = stage["planned_peak_bytes"], stage["measured_peak_bytes"]
    memory = (measured, planned) if planned else None
    seconds = (stage["measured_seconds"], stage["planned_seconds"])
    return Compared(recipe, seed, stage["stage"], seconds, memory, billions)


def table(found: Sequence[Compared]) -> str:
    """Errors by recipe and stage, and their means."""
    lines = ["| recipe | stage | seconds measured, planned | error | memory |", "|---|---|--:|--:|--:|"]
    for item in found:
        memory = f"{error(item.peak_bytes):+.1%}" if item.peak_bytes else "-"
        lines.append(
            f"| {item.recipe} | {item.stage} | {item.seconds[0]:.1f}, {item.seconds[1]:.1f} "
            f"| {error(item.seconds):+.1%} | {memory} |"
        )
    times = [abs(error(item.seconds)) for item in found]
    held = [abs(error(item.peak_bytes)) for item in found if item.peak_bytes]
    return "\n".join([*lines, "", f"mean error: time {fmean(times):.1%}, memory {fmean(held):.1%}"])


def written(found: Sequence[Compared]) -> str:
    """costs/tables/checked_cpu.yaml."""
    pairs = {
        "memory on a CPU": [item.peak_bytes for item in found if item.peak_bytes],
        "time on a CPU": [item.seconds for item in found],
    }
    sizes = sorted({item.billions for item in found})
    lines = [
        "# How far plans of our own stages were off on calibrated CPUs. Written by",
        "# python benchmarks/plan_accuracy.py --write. low, high: factors on a plan that hold",
        f"# {COVERED:.0%} of the measurements; sources: stages of recipes; billions: parameters.",
    ]
    for kind, kind_pairs in pairs.items():
        low, high = interval([measured / planned for measured, planned in kind_pairs])
        lines.append(
            f"{kind}: {{low: {low:.3g}, high: {high:.3g}, rows: {len(kind_pairs)}, "
            f"sources: {len({(row.recipe, row.stage) for row in found})}, "
            f"billions: [{sizes[0]:.3g}, {sizes[-1]:.3g}], generations: [cpu]}}"
        )
    return "\n".join(lines) + "\n"


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The factors that hold COVERED of the ratios: those left out are split between both ends."""
    ordered = sorted(ratios)
    remaining = len(ordered) - ceil(COVERED * len(ordered))
    below = remaining // 2
    return min(1.0, ordered[below]), max(1.0, ordered[len(ordered) - 1 - (remaining - below)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["demo"])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = [item for recipe in options.recipes for item in runs_of(recipe, options.runs, Path(place))]
    print(table(result))
    if options.write:
        CHECKED.write_text(written(result), encoding="utf-8")


if __name__ == "__main__":
    main()
