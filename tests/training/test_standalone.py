import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HIDDEN = """
import importlib.util, runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in {"prefect", "mlflow", "dvc"}
        return None if hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
assert importlib.util.find_spec("mlflow") is None
for stage in ("data", "reward", "ppo", "dpo", "kto", "distill", "evaluate"):
    importlib.import_module(f"training.{stage}")
runpy.run_module("training.sft", run_name="__main__")
"""


@pytest.mark.integration
def test_the_stages_need_neither_prefect_nor_mlflow_nor_dvc(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: -1\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("sft: seed=-1 in params.yaml")
