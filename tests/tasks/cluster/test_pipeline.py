"""A whole run by `rlhf run` with stages on pools of a Ray cluster, killed in the midst and started again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.projects.checkouts import point_remote
from benchmarks.projects.ray_nodes import Cluster
from config.load import load
from config.workspace.rows import pipeline_rows
from tasks.run.run import Run
from tests.conftest import ROOT
from tests.tasks.cluster.waits import attempts, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

SETTINGS = (
    "where.sft.pool=one", "where.ppo={pool: two, nodes: 2, processes: 2}",
    "sft.epochs=200.0", "sft.max_steps=600", "sft.checkpoint_every_steps=20",
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    result = Cluster(tmp_path / "cluster")
    for pool in ("one", "two", "two"):
        result.add(pool)
    yield result
    result.stop()


def test_a_run_whose_stages_are_on_two_pools_is_killed_and_goes_on(
    cluster: Cluster, new_checkout: Callable[[], Path], tmp_path: Path
) -> None:
    root, store = new_checkout(), tmp_path / "store"
    store.mkdir()
    point_remote(root, store)
    environment = os.environ | cluster.variables | {"OMP_NUM_THREADS": "1"}
    changes = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "cli.main",
        "run",
        "--yes",
        "--recipe",
        str(ROOT / "tests/e2e/tiny.yaml"),
        *changes,
    ]
    with (tmp_path / "said.txt").open("wb") as said:
        pipeline = subprocess.Popen(command, cwd=root, env=environment, stdout=said, stderr=said)
        until(lambda: pipeline.poll() is not None or bool([*store.glob("checkpoints/sft/*/*/step-*/manifest.json")]))
        assert pipeline.poll() is None, (tmp_path / "said.txt").read_text()
        pipeline.kill()
        pipeline.wait()
    began = time.monotonic()
    until(lambda: not stages_on(cluster))
    assert time.monotonic() - began < 60, "a stage does not outlive its pipeline"

    doctor = subprocess.run(
        [sys.executable, "-m", "cli.main", "doctor"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert doctor.returncode == 0, doctor.stdout
    assert doctor.stdout.count("pool        one: ") == 1
    assert doctor.stdout.count("pool        two: ") == 2
    (tmp_path / "wrong").write_text("0" * 64)
    refused = subprocess.run(
        [sys.executable, "-m", "cli.main", "doctor"], cwd=root, capture_output=True, text=True, check=False,
        env=environment | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")},
    )  # fmt: skip
    assert refused.returncode == 2
    [line] = [line for line in refused.stdout.splitlines() if line.startswith("problem")]
    assert f"the Ray cluster at RAY_ADDRESS={cluster.address} cannot be reached" in line

    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(root, "any", load(root / "params.yaml"))
    rows = attempts(run, "sft")
    assert [row.event for row in rows if row.attempt == rows[-1].attempt] == ["start", "resume", "end"]
    assert {row.pid for row in attempts(run, "data")}, "data is done here"
    assert [row.exit_code for row in attempts(run, "ppo") if row.event == "end"] == [0]
    assert [row.state for row in pipeline_rows(root) if row.event == "end"] == ["killed", "completed"]
    assert (root / "models/ppo").exists(), "the model comes here to be registered"
    assert not [*store.glob("checkpoints/**/manifest.json")]


def stages_on(cluster: Cluster) -> list[int]:
    """Processes of stages on the nodes."""
    mark = str(cluster.folder)
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if mark in (process.info["environ"] or {}).get("RLHF_WORKSPACES", "")
        and any(word.startswith("training.") for word in process.info["cmdline"] or [])
    ]
