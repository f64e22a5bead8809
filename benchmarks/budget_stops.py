"""Stop a run at random budgets, go on each time, and compare the models with those of a run that was never stopped.

    python benchmarks/budget_stops.py [--stops 20] [--seed 1] [--recipe recipes/demo.yaml] [--json]

Both runs are made in clones of this checkout (its committed code). Each stop is also held against its promise: within
2 % of the budget or one optimizer step, whichever is longer. A stage whose start alone took longer than what was left
(`start_passed_it`, on a busy machine) cannot keep that: it does one step, checkpoints and stops.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.projects.checkouts import clone  # noqa: E402
from config import jsonl  # noqa: E402
from config.errors import OverBudget  # noqa: E402
from config.load import load  # noqa: E402
from config.records import UsageRow  # noqa: E402
from costs.ledger.budget import total  # noqa: E402
from tasks.planning.prepared import spent_by_stage  # noqa: E402
from tasks.run.run import Run, begin_run  # noqa: E402
from tasks.run.stop import StopRequest  # noqa: E402
from tasks.stage.process import POLL_SECONDS  # noqa: E402
from tasks.stage.runner import run_stage  # noqa: E402

STAGES = ("data", "sft", "reward", "ppo")
STOPPED = ("sft", "reward", "ppo")
"""Stages with optimizer steps."""
SHARE_OF_BUDGET = 0.02


def bring_up(run: Run, stage: str) -> None:
    """The stage as a real process, in the run's own folder and with the code there."""
    os.environ["PYTHONPATH"] = str(run.root)
    run_stage(run, stage, StopRequest(), lambda _: None)


def usage(root: Path, stage: str) -> list[UsageRow]:
    return jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of a folder's files."""
    result = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        result.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return result.hexdigest()


def longest_step(rows: list[UsageRow]) -> float:
    """Seconds of the longest step, all its phases together."""
    steps: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.phase not in ("start", "other", "save"):
            steps[row.attempt, row.step] = steps.get((row.attempt, row.step), 0.0) + row.seconds
    return max(steps.values(), default=0.0)


def stopped_run(root: Path, recipe: Path, whole: Path, stops: int, rng: random.Random) -> list[dict[str, Any]]:
    """Run all stages, each stopped at random budgets; what every stop came to."""
    seen: list[dict[str, Any]] = []
    runs: list[Run] = []

    def next_run(stage: str, seconds: float | None) -> Run:
        """`seconds`: what the stage may take from here on."""
        params = load(recipe)
        spent = total(spent_by_stage(root, params, [run.run_id for run in runs]), stage).seconds
        limit = [] if seconds is None else [f"budget.max_hours_by_stage.{stage}={(spent + seconds) / 3600!r}"]
        runs.append(
            begin_run(root, f"stop-{len(runs)}", load(recipe, limit), {"continues": runs[-1].run_id} if runs else {})
        )
        return runs[-1]

    bring_up(next_run("data", None), "data")
    for i, stage in enumerate(STOPPED):
        rows = usage(whole, stage)
        start = sum(row.seconds for row in rows if row.phase == "start")
        work = sum(row.seconds for row in rows) - start
        number = stops // len(STOPPED) + (i < stops % len(STOPPED))
        cuts = sorted(rng.uniform(0, work) for _ in range(number))
        for before, cut in zip([0.0, *cuts], cuts, strict=False):
            if (root / "models" / stage).exists():
                break
            run = next_run(stage, start + max(cut - before, 2 * longest_step(rows)))
            attempts = len(usage(root, stage))
            try:
                bring_up(run, stage)
            except OverBudget:
                budget = run.params.budget.max_hours_by_stage[stage] * 3600
                spent = total(spent_by_stage(root, run.params, [run.run_id for run in runs]), stage).seconds
                new_rows = usage(root, stage)[attempts:]
                allowed = max(SHARE_OF_BUDGET * budget, longest_step(new_rows)) + POLL_SECONDS
                seen.append(
                    {
                        "stage": stage,
                        "budget_seconds": budget,
                        "spent_seconds": spent,
                        "allowed_seconds": allowed,
                        "began": bool(new_rows),
                        "start_passed_it": spent - sum(row.seconds for row in new_rows if row.phase != "start")
                        > budget,
                        "kept": spent - budget <= allowed,
                    }
                )
                print(json.dumps(seen[-1]), file=sys.stderr, flush=True)
        bring_up(next_run(stage, None), stage)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/demo.yaml")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    recipe = arguments.recipe.resolve()
    with tempfile.TemporaryDirectory() as folder:
        whole, stopped = clone(Path(folder) / "whole"), clone(Path(folder) / "stopped")
        run = begin_run(whole, "whole", load(recipe), {})
        for stage in STAGES:
            bring_up(run, stage)
        stops = stopped_run(stopped, recipe, whole, arguments.stops, random.Random(arguments.seed))
        same = {stage: digest(whole / "models" / stage) == digest(stopped / "models" / stage) for stage in STOPPED}
    late = sum(stop["start_passed_it"] for stop in stops)
    result = {
        "stops": len(stops),
        "kept": sum(stop["kept"] for stop in stops),
        "start_passed_it": late,
        "identical": same,
    }
    print(json.dumps(result | {"each": stops}, indent=1) if arguments.json else json.dumps(result))
    return 0 if all(same.values()) and all(stop["kept"] or stop["start_passed_it"] for stop in stops) else 1


if __name__ == "__main__":
    sys.exit(main())
