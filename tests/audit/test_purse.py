"""The month of a project with a study, a judge that was killed and two workspaces, added up by hand from the rows."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.load import load, write
from tests.audit.accounts import rows_of
from tests.conftest import ROOT
from tests.support.clock import Clock

PRICE = 3.6
"""US dollars per device hour: a second is 0.001."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A run whose judge was killed after two answers and a study's run, both of this month, with a limit on it."""
    params = load(ROOT / "recipes" / "demo.yaml", [f"prices.usd_per_device_hour={PRICE}", "budget.monthly_usd=0.9"])
    for root, run_id, kind in (
        (tmp_path, "judged", "evaluate"),
        (tmp_path / ".rlhf" / "studies" / "levers", "variant", "sft"),
    ):
        clock = Clock(root, run_id, time.time() - 300)
        clock.pipeline("start")
        clock.attempt(kind, 1, "start")
        clock.use(kind, 1, "start", 0, 4.0)
        clock.use(kind, 1, "train", 1, 60.0)
        if kind == "evaluate":
            for _ in range(2):
                clock.use(kind, 1, "judge", 3, 0.0, usd=0.4)
        else:
            clock.attempt(kind, 1, "end", 1, exit_code=0)
            clock.pipeline("end", state="completed")
        write(params, root / "params.yaml")
        (root / "runs" / "pipeline" / run_id).mkdir(parents=True)
        write(params, root / "runs" / "pipeline" / run_id / "params.yaml")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    return tmp_path


def rlhf(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cli.main import main; main()", *arguments]
    return subprocess.run(
        command, cwd=root, env={"PATH": "/usr/bin:/bin", "HOME": str(root), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_month_is_the_sum_of_all_rows_of_the_project(project: Path) -> None:
    rows = [row for path in project.rglob("usage.jsonl") for row in rows_of(path)]
    judges = sum(row.get("usd", 0.0) for row in rows)
    total = sum(row["seconds"] for row in rows) * PRICE / 3600 + judges
    assert (len(rows), judges) == (6, pytest.approx(0.8))
    done = rlhf(project, "report", "--month", "--json")
    assert done.returncode == 0, done.stderr
    month = json.loads(done.stdout)
    assert month["spent_usd"] == pytest.approx(total, rel=1e-6)
    assert {item["kind"] for item in month["expenses"]} == {"run", "study", "judge"}
    assert sum(item["usd"] for item in month["expenses"] if item["kind"] == "judge") == pytest.approx(judges)
    assert month["limit_usd"] == 0.9
    shown = rlhf(project, "report", "--month").stdout
    assert "variant" in shown
    assert "$0.93" in shown
