"""A method that is one file in config/methods is trained and planned like the others; the file is docs/tour.md's
example.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.training.support.processes import metric_rows, metrics

TOUR = ROOT / "docs" / "tour.md"
TRAIN = """
import sys
from training.process.run import entry, run_stage
sys.exit(run_stage("reinforce", *entry("reinforce")))
"""
PLAN = """
from pathlib import Path
from config.load import load
from costs.planning.planner import plan
from costs.planning.target import find_target
params = load(Path("params.yaml"))
found = plan(params, find_target(params, "rtx4090", 1, None, Path()), params.stages)
print(*[f"{stage.stage} {stage.seconds > 0}" for stage in found.stages])
"""


@pytest.mark.integration
def test_a_fifth_method_is_one_file(project: Callable[..., Path], tmp_path: Path) -> None:
    root = project("rloo")
    checkout = tmp_path / "checkout"
    for package in ("config", "costs", "training"):
        shutil.copytree(ROOT / package, checkout / package)
    shutil.copy(ROOT / "dvc.yaml", checkout)
    example = re.search(r"```python\n# config/methods/reinforce\.py\n(.*?)```", TOUR.read_text(), re.S)
    assert example is not None
    (checkout / "config/methods/reinforce.py").write_text(example[1], encoding="utf-8")
    content = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    section = content["rloo"] | {"reinforce_epochs": 1, "updates": 2}
    del section["rloo_epochs"], section["normalise_advantages"], section["refill"]
    content |= {"align": {"method": "reinforce"}, "reinforce": section}
    (root / "params.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")

    def run(script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(TRAIN)
    rows = [row.values for row in metric_rows(root, "reinforce")]
    assert [row["episodes"] for row in rows] == [section["batch_size"], 2 * section["batch_size"]]
    assert all("equal_groups" in row and "value_loss" not in row for row in rows)
    assert metrics(root, "reinforce")["updates"] == 2
    assert (root / "models/reinforce/model.safetensors").exists()
    assert "reinforce True" in run(PLAN)
