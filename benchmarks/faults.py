"""Faults in the middle of whole pipelines: does running again give what the undisturbed run gave?

    python -m benchmarks.faults [--seed 1] [--faults 20] [--kind "kill stage"] [--json] [--again]

Processes die by kill -9 (pipeline, also while DVC records, stage, servers, actor and raylet of a node, all at once),
terminals and pipes close, disks fill up, MLflow, Prefect and the store go away for a while, an MLflow run is deleted,
the clock jumps; at moments drawn from the seed, in local runs and in runs whose stage is placed on a node of a Ray
cluster. Then `rlhf run` again, and whatever its messages ask for. A fault is recovered if that run
completes, `models/` has the undisturbed bits, every row is in MLflow exactly once, the ledger has the time of the
processes within 1% or 2 s, nothing was promoted, and no process and no lock is left.

Each case is a line of .bench/faults/seed-<S>.jsonl as soon as it is done: started again, the same seed goes on where
it stopped. --again does the cases again that were not recovered. Linux; as root for full disks (a tmpfs), with a C
compiler for the clock.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also as a script: the code beside it

from benchmarks.fault_injection import checks, moments  # noqa: E402
from benchmarks.fault_injection.project import STAGES, Project, Timeline  # noqa: E402
from benchmarks.fault_injection.strikes import KINDS, ROOM_BYTES, Kind, Scene, Terminal  # noqa: E402
from benchmarks.fault_injection.witness import Witness  # noqa: E402
from benchmarks.fault_injection.world import World  # noqa: E402
from training.evaluation.intervals import wilson  # noqa: E402

FOLDER = ROOT / ".bench" / "faults"
RUN_SECONDS = 900.0
"""After which a run that takes a minute on an idle machine is taken for stuck."""
LEFT_SECONDS = 20.0
"""For processes of a run that has ended to go."""
LEDGER_SECONDS, LEDGER_SHARE = 2.0, 0.01


def draw(seed: int, index: int, timelines: dict[str, Timeline]) -> tuple[Kind, moments.Moment]:
    """The case of that index: every kind once in each round of the table, in another order."""
    number, place = divmod(index, len(KINDS))
    kind = random.Random(f"{seed}/{number}").sample(KINDS, len(KINDS))[place]
    rng = random.Random(f"{seed}/{number}/{kind.key}")
    stage = rng.choice(STAGES)
    return kind, moments.draw(rng, stage, timelines[stage])


def case(project: Project, seed: int, index: int) -> dict[str, Any]:
    """One fault, from the project put back to the checks; a line of the results."""
    about = project.about()
    timelines = {stage: Timeline(**result) for stage, result in about["timelines"].items()}
    kind, moment = draw(seed, index, timelines)
    began = time.monotonic()
    mark = f"{seed}-{index}-{os.getpid()}"
    with small_disk(project, kind.small_disk):
        project.put_back(moment.stage)
        world = World(project, project.environment(mark))
        rng = random.Random(f"{seed}/{index}/{kind.key}/how")
        with Witness(mark) as witness:
            scene = Scene(project, world, witness, moment.stage, rng)
            try:
                result = faulted(kind, moment, scene)
                result |= checked(scene)
            finally:
                world.end()
                remaining = left_behind(witness)
    result["recovered"] = (
        not remaining
        and all(result[name] for name in ("completed", "same_bits", "rows_once", "ledger_holds"))
        and not (result["promoted"] or result["locks"])
    )
    return {
        "kind": kind.key,
        "moment": str(moment),
        **result,
        "left": remaining,
        "index": index,
        "seed": seed,
        "code": about["code"],
        "seconds": round(time.monotonic() - began, 1),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def faulted(kind: Kind, moment: moments.Moment, scene: Scene) -> dict[str, Any]:
    """The run with the fault, and the one after it if that did not complete."""
    kind.prepare(scene)
    outage = scene.rng.choice(kind.outages)
    scene.run = Terminal(scene, kind.way)
    process = scene.run.process
    struck = moments.reached(moment, scene.project, scene.witness, lambda: process.poll() is not None)
    undo = (kind.strike(scene) if struck else None) or (lambda: None)
    if outage is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(outage)
        undo()
    first = ended(process)
    said = scene.run.said()
    if outage is None:
        undo()
    codes = [first]
    if first != 0:
        scene.run = Terminal(scene)
        codes.append(ended(scene.run.process))
        said += scene.run.said()
    if "rlhf report --sync" in said:
        done = subprocess.run(
            scene.project.command("report", "--sync"),
            cwd=scene.project.root,
            env=scene.world.environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        scene.notes.append(f"report --sync: {done.returncode}")
    lines = [line for line in said.splitlines() if re.match(r"(rlhf|warning): ", line)]
    return {
        "struck": struck,
        "outage_seconds": outage,
        "notes": scene.notes,
        "exit_codes": codes,
        "said": lines[-6:] if codes[-1] == 0 else said.splitlines()[-12:],
        "traceback": "Traceback" in said,
        "completed": codes[-1] == 0,
    }


def ended(process: "subprocess.Popen[bytes]") -> int | None:
    """Its exit code, None if it had to be killed after all."""
    try:
        return process.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def checked(scene: Scene) -> dict[str, Any]:
    """What must hold once no run is running any more."""
    project, witness = scene.project, scene.witness
    deadline = time.monotonic() + LEFT_SECONDS
    while any(process.stage for process in witness.alive()) and time.monotonic() < deadline:
        time.sleep(0.2)
    real, booked = witness.stage_seconds(), checks.ledger_seconds(project)
    error = booked - real
    rows = checks.row_faults(project, scene.stage, scene.deleted)
    locks, promoted = checks.locks_left(project), checks.promoted(project)
    result = {
        "same_bits": checks.same_bits(project),
        "rows_once": not rows,
        "ledger_seconds_error": round(error, 2),
        "real_seconds": round(real, 2),
        "row_faults": rows[:5],
        "locks": locks,
        "promoted": promoted,
    }
    result["ledger_holds"] = abs(error) <= max(LEDGER_SECONDS, LEDGER_SHARE * real)
    return result


def left_behind(witness: Witness) -> list[str]:
    """What is alive after servers and worker have been stopped; it is killed."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (alive := witness.alive()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return [" ".join(process.command)[:200] for process in alive]


@contextmanager
def small_disk(project: Project, wanted: bool) -> Iterator[None]:
    """The project on a file system of its own, with little room beside the undisturbed project."""
    project.root.mkdir(exist_ok=True)
    if os.path.ismount(project.root):  # of a case that was killed
        subprocess.run(["umount", "--lazy", str(project.root)], check=True)
    if not wanted:
        yield
        return
    for child in project.root.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()
    used = sum(-(-path.lstat().st_size // 4096) * 4096 for path in (project.undisturbed / "project").rglob("*"))
    size = f"size={used + ROOM_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(project.root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(project.root)], check=True)


# ---------------------------------------------------------------- many of them


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Index -> its newest line."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["index"]: line for line in lines}


def table(lines: list[dict[str, Any]]) -> str:
    """Kind x what held, and in the last line all of them with the interval of the recoveries."""
    columns = ("struck", "recovered", "completed", "same_bits", "rows_once", "ledger_holds")
    shown = [f"{'kind':<32}{'faults':>7}" + "".join(f"{name:>14}" for name in columns)]
    for kind in [*dict.fromkeys(kind.key for kind in KINDS), "all"]:
        chosen = [line for line in lines if kind in (line["kind"], "all")]
        if chosen:
            counts = "".join(f"{sum(line[name] for line in chosen):>14}" for name in columns)
            shown.append(f"{kind:<32}{len(chosen):>7}{counts}")
    struck = [line for line in lines if line["struck"]]
    if struck:
        result = wilson(sum(line["recovered"] for line in struck), len(struck))
        shown.append(
            f"recovered {result.value:.1%} of {len(struck)} faults that struck "
            f"(95% interval {result.low:.1%} to {result.high:.1%})"
        )
    return "\n".join(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=len(KINDS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="results, and the project")
    parser.add_argument("--again", action="store_true", help="do what was not recovered again")
    parser.add_argument("--only", type=int, nargs="*", help="these cases, whatever was done")
    parser.add_argument("--kind", nargs="*", help="of the faults only those of these names")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends what a case has started
        signal.signal(number, signal.default_int_handler)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / f"seed-{given.seed}.jsonl"
    project = Project(given.folder)
    done = read(path)
    with small_disk(project, False):
        project.build()
    about = project.about()
    timelines = {stage: Timeline(**result) for stage, result in about["timelines"].items()}
    chosen = [
        index
        for index in given.only or range(given.faults)
        if not given.kind or draw(given.seed, index, timelines)[0].name in given.kind
    ]
    for index in chosen:
        earlier = done.get(index)
        if earlier and not given.only and not (given.again and not earlier["recovered"]):
            continue
        line = case(project, given.seed, index)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        done[index] = line
        state = "recovered" if line["recovered"] else "NOT RECOVERED"
        print(f"{index}: {line['kind']}; {line['moment']}: {state}", file=sys.stderr, flush=True)
    lines = [line for index, line in sorted(done.items()) if index in chosen]
    if given.json:
        print(json.dumps({"seed": given.seed, "faults": lines}, indent=1))
    else:
        print(table(lines))
    return 0 if all(line["recovered"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
