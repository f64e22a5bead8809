"""How far the planner is off on this machine: configurations are drawn from a seed, each is run for
a few steps in a fresh process, and its peak memory, parts of memory and seconds per phase are put
beside the plan.

    python benchmarks/plan_accuracy.py --seed 1 --configurations 40 [--stages sft reward ppo dpo]
    [--processes 2] [--json] [--picture FILE.svg]

Memory is the peak above what the process held after its imports. Time is CPU seconds of one thread,
without the first step, which warms up, divided by how much slower the machine was at that moment
than when it was calibrated: run `rlhf calibrate` with OMP_NUM_THREADS=1 before. What was measured
is kept in .bench/plan/, so that a run that was stopped goes on, and a changed formula is compared
without measuring again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.plan_measurement.cases import KNOWN, STAGES, Case, draw, steps
from benchmarks.plan_measurement.folder import make, plan_inputs, read_json
from benchmarks.plan_measurement.picture import scatter
from config import jsonl
from config.records import RENDEZVOUS_VARIABLE, UsageRow
from config.workspace.machine import Passes
from costs.formulas.process_heap import imports_bytes
from costs.formulas.setting import Setting
from costs.planning.machine import slowdown
from costs.planning.moments import moments
from costs.planning.planner import plan
from costs.planning.plans import StagePlan
from costs.planning.settings import settings
from costs.planning.target import target

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".bench" / "plan"
MOST_SECONDS = 900
"""Of one run: on a busy machine most of it is waiting for a core."""
CHECKED = ROOT / "costs" / "tables" / "checked_cpu.yaml"
COVERED = 0.85
"""Share of the measurements that an interval is to hold."""
UNTIMED = ("start", "save", "evaluate", "other")
PARTS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Comparison:
    """One configuration, measured and planned. Bytes are above the imports; seconds are of one step
    (update, for ppo).
    """

    name: str
    stage: str
    peak_bytes: tuple[float, float]
    """(measured, planned), as everywhere below."""
    parts: dict[str, tuple[float, float]]
    seconds: dict[str, tuple[float, float]]
    slowdown: float
    """Of the machine when this was measured, against when it was calibrated; the measured seconds
    are divided by it where errors are computed.
    """


def error(pair: tuple[float, float]) -> float:
    """Of the plan, relative to the measurement."""
    return pair[1] / pair[0] - 1


def _failure(case: Case, code: int, log: Path) -> str:
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return f"{case.name} failed with exit code {code}: {''.join(last)}. The whole log is {log}."


def measured(case: Case, kept: Path) -> dict[str, Any]:
    """What a fresh process measured, from an earlier run where it is the same case.

    Raises SystemExit with the log's last line if the stage fails.
    """
    folder, made_from = kept / case.name, case.params.model_dump(mode="json")
    result = folder / "result.json"
    if (
        result.exists()
        and (kept_result := read_json(result))["params"] == made_from
        and "pace" in kept_result
    ):
        return kept_result
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(case, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if any(codes := started(case, folder, environment)):
        raise SystemExit(_failure(case, next(filter(None, codes)), folder / "log.txt"))
    rows = jsonl.read(folder / "runs" / case.stage / "usage.jsonl", UsageRow).rows
    peaks = {
        phase: max(row.peak_bytes for row in rows if row.phase == phase)
        for phase in dict.fromkeys(row.phase for row in rows)
    }
    found = read_json(folder / "bench/process.json") | {
        "params": made_from,
        "phase_peaks": peaks,
        "peak_bytes": max(peaks.values()),
    }
    result.write_text(json.dumps(found), encoding="utf-8")
    for place in ("models", "base", "data", "checkpoints", "runs", "plots"):
        shutil.rmtree(folder / place, ignore_errors=True)
    return found


def started(case: Case, folder: Path, environment: dict[str, str]) -> list[int]:
    """Exit codes of the case's processes, which meet over gloo where they are several; the first
    one says what it held.
    """
    several = case.params.where.of(case.stage).processes
    shared = {
        "WORLD_SIZE": str(several),
        "LOCAL_WORLD_SIZE": str(several),
        RENDEZVOUS_VARIABLE: str(folder / "rendezvous"),
    }
    running = []
    with (folder / "log.txt").open("wb") as log:
        for rank in range(several):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if several > 1 else {}
            command = [
                sys.executable,
                "-m",
                "benchmarks.plan_measurement.stage_process",
                case.stage,
            ]
            running.append(
                subprocess.Popen(command, cwd=folder, env=environment | own, stdout=log, stderr=log)
            )
        try:
            return [process.wait(timeout=MOST_SECONDS) for process in running]
        finally:
            for process in running:
                process.kill()


def compare(case: Case, found: dict[str, Any], kept: Path) -> Comparison:
    """The plan of a case, made as `rlhf plan` makes it, beside its measurement."""
    plan_inputs(case, kept / case.name)
    processes = case.params.where.of(case.stage).processes
    aim = target(case.params, None, processes, None, ROOT)
    aim = replace(aim, root=kept / case.name)
    setting = settings(case.params, aim)[case.stage]
    made = plan(case.params, aim, (case.stage,)).stages[0]
    peak = (
        found["peak_bytes"] - found["after_imports_bytes"],
        made.peak_bytes_per_gpu - imports_bytes(setting),
    )
    parts = {
        part: (float(found[f"{part}_bytes"]), planned_part(setting, part))
        for part in PARTS
        if found.get(f"{part}_bytes")
    }
    own = setting.hardware.measured
    return Comparison(
        case.name,
        case.stage,
        peak,
        parts,
        # processes that share a core wait for each other
        seconds_of(found, made, steps(case)) if processes == 1 else {},
        slowdown(map(Passes.model_validate, found["pace"]), own.machine) if own else 1.0,
    )


def planned_part(setting: Setting, part: str) -> float:
    """Bytes of a part over all roles at the optimizer step, where the measurement was taken."""
    steps = [moment for moment in moments(setting) if moment.phase.endswith(":step")]
    # the policy's is the last: by then no backward pass has weights gathered
    return sum(parts.get(part, 0.0) for parts in steps[-1].roles.values())


def seconds_of(
    found: dict[str, Any], made: StagePlan, steps: int
) -> dict[str, tuple[float, float]]:
    """Mean CPU seconds of a step in each phase, and the plan's."""
    planned = {phase.phase: phase.seconds / steps for phase in made.phases}
    spent: dict[str, list[float]] = {}
    for phase, step, seconds in found["cpu_seconds"]:
        if phase in planned and phase not in UNTIMED and step > 1:
            spent.setdefault(phase, []).append(seconds)
    return {phase: (fmean(values), planned[phase]) for phase, values in spent.items()}


# ---------------------------------------------------------------- the whole


def summary(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Memory: mean, worst and lowest error; parts; time by phase and by stage."""
    memory = [error(row.peak_bytes) for row in rows]
    return {
        "configurations": len(rows),
        "memory": {
            "mean_error": fmean(map(abs, memory)),
            "worst": max(map(abs, memory)),
            "lowest": min(memory),
        },
        "parts": {
            part: fmean(abs(error(row.parts[part])) for row in rows if part in row.parts)
            for part in PARTS
        },
        "slowdown": median(row.slowdown for row in rows),
        "phases": by_name(
            (name, at_pace(pair, row)) for row in rows for name, pair in row.seconds.items()
        ),
        "stages": by_name((row.stage, at_pace(total(row), row)) for row in rows if row.seconds),
    }


def at_pace(pair: tuple[float, float], row: Comparison) -> tuple[float, float]:
    """(measured, planned), the measurement as it would be on the machine as it was calibrated."""
    return pair[0] / row.slowdown, pair[1]


def total(row: Comparison) -> tuple[float, float]:
    """Seconds of a step over all its phases."""
    return sum(pair[0] for pair in row.seconds.values()), sum(
        pair[1] for pair in row.seconds.values()
    )


def by_name(pairs: Iterable[tuple[str, tuple[float, float]]]) -> dict[str, float]:
    """Median absolute error of each name."""
    found: dict[str, list[float]] = {}
    for name, pair in pairs:
        found.setdefault(name, []).append(abs(error(pair)))
    return {name: median(values) for name, values in found.items()}


def write_checked(rows: Sequence[Comparison], drawn: Sequence[Case]) -> None:
    """costs/tables/checked_cpu.yaml: between which factors on a plan the measurements lie."""
    sizes = [case.shape.parameters / 1e9 for case in drawn]
    times = [at_pace(total(row), row) for row in rows if row.seconds]
    lines = [
        "# How far plans of our own stages were off on calibrated CPUs. Written by",
        "# python benchmarks/plan_accuracy.py --write. low, high: factors on a plan that hold",
        f"# {COVERED:.0%} of the measurements; sources: configurations; billions: of parameters.",
    ]
    for kind, pairs in (
        ("memory on a CPU", [row.peak_bytes for row in rows]),
        ("time on a calibrated CPU", times),
    ):
        low, high = interval([found / planned for found, planned in pairs])
        domain = {
            "low": round(low, 3), "high": round(high, 3), "rows": len(pairs),
            "sources": len(pairs), "billions": [round(f(sizes), 5) for f in (min, max)],
            "generations": ["cpu"],
        }  # fmt: skip
        lines.append(f"{kind}: {json.dumps(domain)}".replace('"', ""))
    CHECKED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The factors that hold COVERED of the ratios measured / planned, 1 among them."""
    ordered = sorted(ratios)
    tail = (1 - COVERED) / 2
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * at))] for at in (tail, 1 - tail))
    return min(low, 1.0), max(high, 1.0)


def table(rows: Sequence[Comparison], figures: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{'configuration':<16}{'MiB':>7}{'planned':>9}{'error':>8}   slowdown, seconds of a step, "
        "measured and planned"
    ]
    for row in rows:
        paced = {name: at_pace(pair, row) for name, pair in row.seconds.items()}
        times = f"{row.slowdown:.2f}  " + "  ".join(
            f"{name} {pair[0]:.3g}/{pair[1]:.3g} ({error(pair):+.0%})"
            for name, pair in paced.items()
        )
        now, then = (size / 2**20 for size in row.peak_bytes)
        lines.append(
            f"{row.name:<16}{now:>7.0f}{then:>9.0f}{error(row.peak_bytes):>+8.1%}   {times}"
        )
    memory = figures["memory"]
    lines += [
        f"memory: mean error {memory['mean_error']:.1%}, worst {memory['worst']:.1%}, lowest "
        f"{memory['lowest']:+.1%}",
        "parts, mean error: "
        + ", ".join(f"{name} {value:.1%}" for name, value in figures["parts"].items()),
        "time by phase, median error: "
        + ", ".join(f"{name} {value:.1%}" for name, value in figures["phases"].items()),
        "time by stage, median error: "
        + ", ".join(f"{name} {value:.1%}" for name, value in figures["stages"].items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1, help="of each stage that can be shared")
    parser.add_argument("--stages", nargs="+", choices=KNOWN, default=list(STAGES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path)
    parser.add_argument(
        "--write", action="store_true", help=f"write {CHECKED.name}, which intervals rest on"
    )
    options = parser.parse_args()
    rows = []
    drawn = draw(
        options.seed, options.configurations, tuple(options.stages), processes=options.processes
    )
    for case in drawn:
        print(case.name, file=sys.stderr, flush=True)
        rows.append(compare(case, measured(case, KEPT), KEPT))
    figures = summary(rows)
    if options.write:
        write_checked(rows, drawn)
    if options.picture:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        points = [(row.stage, row.peak_bytes[0] / 2**20, row.peak_bytes[1] / 2**20) for row in rows]
        options.picture.write_text(
            scatter(points, "peak memory above the imports, MiB"), encoding="utf-8"
        )
    print(
        json.dumps({**figures, "rows": [asdict(row) for row in rows]}, indent=1)
        if options.json
        else table(rows, figures)
    )


if __name__ == "__main__":
    main()
