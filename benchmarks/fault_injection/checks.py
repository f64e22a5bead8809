"""What must hold after a fault and a recovery, read from the files and from MLflow's own tables."""

import math
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import yaml

from benchmarks.fault_injection.project import STAGES, Project, bits
from config import jsonl
from config.dvc_stages import dvc_name
from config.load import load
from config.locks import is_held
from config.records import MetricRow, PipelineRow, UsageRow
from config.workspace.at_work import RUN_LOCK
from costs.ledger.ledger import read_ledger

DATABASE = "mlflow.db"
PREFIXES = {"evaluate": "eval"}
OF_ATTEMPT = 3
"""Slashes in the key of an attempt's run: workspace/run/stage/attempt."""
Point = tuple[str, str, int, str]
"""Key of an MLflow run, metric, step, value."""


def same_bits(project: Project) -> bool:
    """Every folder of models/ has the bytes of the undisturbed run's, and dvc.lock says so too."""
    locks = [
        yaml.safe_load((root / "dvc.lock").read_text())["stages"]
        for root in (project.root, project.undisturbed / "project")
    ]
    models = [
        {
            out["path"]: out["md5"]
            for stage in STAGES
            for out in lock.get(dvc_name(stage), {}).get("outs", [])
            if out["path"].startswith("models/")
        }
        for lock in locks
    ]
    return bits(project.root) == project.about()["bits"] and models[0] == models[1]


def row_faults(project: Project, first: str, deleted: str | None) -> list[str]:
    """Why not every metric row, and every row on costs, of every attempt is in MLflow once, or a step of a stage from
    `first` on has none; empty if all is well. What was of a run that was `deleted` in MLflow (its key) may be missing.
    """
    faults = []
    with closing(sqlite3.connect(f"file:{project.root / DATABASE}?mode=ro", uri=True)) as database:
        keys = dict(
            database.execute(
                "select t.run_uuid, t.value from tags t join runs r on t.run_uuid = r.run_uuid"
                " where t.key = 'rlhf.key' and r.lifecycle_stage = 'active'"
            ).fetchall()
        )
        everything = database.execute("select run_uuid, key, step, value, is_nan from metrics")
        there = Counter(
            (keys[run].partition("/")[2], name, step, _text(math.nan if is_nan else value))
            for run, name, step, value, is_nan in everything
            if run in keys and keys[run].count("/") == OF_ATTEMPT and name.startswith(OWN)
        )
    faults += [f"{key} is two runs" for key, n in Counter(keys.values()).items() if n > 1]
    wanted = wanted_points(project.root)
    for point in sorted(wanted.keys() | there.keys()):
        if wanted[point] != there[point] and point[0] != deleted:
            faults.append(f"{point}: {wanted[point]} in the files, {there[point]} in MLflow")
    undisturbed = project.undisturbed / "project"
    for stage in STAGES[STAGES.index(first) :]:
        before = _steps(undisturbed, stage)
        runs_by_step = {
            step: runs - set().union(*before.values()) for step, runs in _steps(project.root, stage).items()
        }
        if missing := [step for step in before if not runs_by_step.get(step)]:
            faults.append(f"{stage}: no rows of steps {missing}")
    return faults


OWN = ("phase/", *(f"{PREFIXES.get(stage, stage)}/" for stage in STAGES))


def wanted_points(root: Path) -> Counter[Point]:
    """What the streams of all stages say."""
    wanted: Counter[Point] = Counter()
    price = load(root / "params.yaml").prices.usd_per_device_hour
    assert price is not None
    for stage in STAGES:
        folder, prefix = root / "runs" / stage, PREFIXES.get(stage, stage)
        for row in jsonl.read(folder / "metrics.jsonl", MetricRow).rows:
            key = f"{row.run_id}/{stage}/{row.attempt}"
            for name, value in row.values.items():
                wanted[key, f"{prefix}/{name}", row.step, _text(value)] += 1
        for used in jsonl.read(folder / "usage.jsonl", UsageRow).rows:
            key = f"{used.run_id}/{stage}/{used.attempt}"
            values = {
                "seconds": used.seconds,
                "tokens": used.tokens,
                "peak_bytes": used.peak_bytes,
                "usd": used.seconds * used.world_size * price / 3600,
            }
            for name, value in values.items():
                wanted[key, f"phase/{used.phase}/{name}", used.step, _text(value)] += 1
    return wanted


def _text(value: float) -> str:
    return f"{value:.9g}"


def _steps(root: Path, stage: str) -> dict[int, set[str]]:
    """Step -> the runs that have a metric row of it."""
    result: dict[int, set[str]] = {}
    for row in jsonl.read(root / "runs" / stage / "metrics.jsonl", MetricRow).rows:
        result.setdefault(row.step, set()).add(row.run_id)
    return result


def ledger_seconds(project: Project) -> float:
    """What the ledger says of all runs of this case together."""
    path = "runs/pipeline.jsonl"
    before, now = (
        jsonl.read(root / path, PipelineRow).rows for root in (project.undisturbed / "project", project.root)
    )
    runs = dict.fromkeys(row.run_id for row in now[len(before) :])
    params = load(project.root / "params.yaml")
    return sum(read_ledger(project.root, params, run_id).total_seconds for run_id in runs)


def promoted(project: Project) -> bool:
    """A champion was named, in our record or in MLflow's registry."""
    with closing(sqlite3.connect(f"file:{project.root / DATABASE}?mode=ro", uri=True)) as database:
        aliases = database.execute("select alias from registered_model_aliases").fetchall()
    return (project.root / "champions" / "record.json").exists() or ("champion",) in aliases


def locks_left(project: Project) -> list[str]:
    """Locks that are held."""
    return [str(path) for path in (RUN_LOCK, Path(".dvc/tmp/lock")) if is_held(project.root / path)]
