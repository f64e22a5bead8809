"""Two runs in one folder as rlhf leaves them: the second has another KL coefficient, more updates, another price, and
changed data rows.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from config.load import load, write
from tests.conftest import ROOT
from tests.reporting.plausible_run import BEGIN, SAMPLES, write_json, write_pipeline_run, write_update
from tests.support.clock import Clock

FIRST, SECOND = "20261121-120000-a1b2", "20261121-130000-c3d4"
FIRST_DATA, SECOND_DATA = "1" * 32 + ".dir", "2" * 32 + ".dir"
REWARD = {"models/reward": "3" * 32 + ".dir"}


def write_two_runs(root: Path) -> None:
    """The first run kept its copies, the second one's results are in place."""
    demo = ROOT / "recipes" / "demo.yaml"
    (root / "dvc.yaml").touch()
    for run_id, changes in (
        (FIRST, []),
        (SECOND, ["ppo.kl.coef=0.2", "ppo.updates=60", "prices.usd_per_device_hour=0.2"]),
    ):
        folder = root / "runs" / "pipeline" / run_id
        folder.mkdir(parents=True)
        write(load(demo, changes), folder / "params.yaml")
    write_pipeline_run(root, FIRST)
    note_versions(Clock(root, FIRST, BEGIN + 600), FIRST_DATA)
    write_rows(root, "preference", "train", range(100))
    write_rows(root, "preference", "test", range(100, 120))
    for name in ("metrics", "evaluation"):
        shutil.copytree(root / name, root / "runs" / "pipeline" / FIRST / name)
    write_second_run(root)


def write_second_run(root: Path) -> None:
    clock = Clock(root, SECOND, BEGIN + 3600)
    clock.pipeline("start")
    write_rows(root, "preference", "train", range(10, 130))
    note_versions(clock, SECOND_DATA)
    clock.pipeline("stage", stage="sft", cached=True, attempt=1)
    rng = random.Random(2)
    clock.attempt("ppo", 3, "start")
    clock.use("ppo", 3, "start", 0, 7.5)
    for update in range(1, 61):
        write_update(clock, 3, update, rng, hacking=False)
    clock.done("ppo", 3, 60)
    clock.attempt("evaluate", 2, "start")
    clock.use("evaluate", 2, "generate", 1, 7.0, tokens=57_000, sequences=1200)
    clock.done("evaluate", 2, 1)
    metrics = json.loads((root / "metrics/evaluate.json").read_text())
    metrics |= {
        "gold_aligned": 0.93,
        "win_rate_gold": 0.948,
        "win_rate_gold_low": 0.92,
        "win_rate_gold_high": 0.966,
        "kl": 4.1,
    }
    metrics |= {"win_rate_reward": 0.94, "win_rate_reward_low": 0.912, "win_rate_reward_high": 0.96}
    write_json(root / "metrics/evaluate.json", metrics)
    rows = [json.loads(line) for line in (root / "evaluation/samples.jsonl").read_text().splitlines()]
    rows = [row | {"aligned": f"{row['aligned']} thank you <b>& bye</b>."} for row in rows[: len(SAMPLES) - 1]]
    (root / "evaluation/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clock.pipeline("end", state="completed")


def note_versions(clock: Clock, data: str) -> None:
    clock.pipeline("stage", stage="data", cached=True, attempt=1, detail={"outs": {"data/prepared": data}})
    clock.pipeline("stage", stage="reward", cached=True, attempt=1, detail={"outs": REWARD})


def write_rows(root: Path, dataset: str, split: str, numbers: range) -> None:
    path = root / "data" / "prepared" / dataset / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {number}", "chosen": "yes", "rejected": "no"} for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
