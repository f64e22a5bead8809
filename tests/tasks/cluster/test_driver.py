"""A stage on nodes of a Ray cluster; the nodes are processes of this machine with folders of their own, and the store
is a folder.
"""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.projects.checkouts import point_remote
from config import jsonl
from config.errors import EnvironmentFault, OverBudget, StageStopped
from config.load import load
from config.records import MetricRow
from costs.ledger.ledger import read_ledger
from tasks.cluster import driver
from tasks.cluster.driver import run_placed
from tasks.dvc.transfers import fetch
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.stage.outcome import Outcome
from tasks.stage.runner import run_stage
from tests.conftest import ROOT
from tests.tasks.cluster.ray_nodes import Cluster
from tests.tasks.pool import LONG, attempts, once

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.xdist_group("ray")]

TINY = ROOT / "tests" / "e2e" / "tiny.yaml"
TWO = "{pool: two, nodes: 2, processes: 2, sharding: zero3}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    short = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    result = Cluster(tmp_path_factory.mktemp("cluster"), short)
    result.add("one")
    for _ in range(2):
        result.add("two")
    with pytest.MonkeyPatch.context() as patch:  # Ray reads its variables when it is imported
        for name, value in result.variables.items():
            patch.setenv(name, value)
        yield result
    result.stop()
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def new_run(
    new_checkout: Callable[[], Path], tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Begins a pipeline run in one checkout, with its store."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root, names = new_checkout(), iter(range(10))
    point_remote(root, tmp_path / "store")

    def make(*changes: str) -> Run:
        return begin_run(root, f"run-{next(names)}", load(TINY, list(changes)), {})

    return make


def bring_up(run: Run, stage: str, stop: StopRequest | None = None) -> Outcome:
    placed = run.params.where.of(stage).pool != "local"
    return (run_placed if placed else run_stage)(run, stage, stop or StopRequest(), lambda progress: None)


def weights(run: Run, stage: str) -> dict[str, torch.Tensor]:
    fetch(run.root, [f"models/{stage}"])
    return load_file(run.root / f"models/{stage}/model.safetensors")


def steps(run: Run, stage: str, attempt: int) -> list[tuple[int, float]]:
    """Step and time of each row of an attempt."""
    rows = jsonl.read(run.root / f"runs/{stage}/metrics.jsonl", MetricRow).rows
    return [(row.step, row.time) for row in rows if row.attempt == attempt]


def test_two_nodes_that_share_no_folder_learn_what_one_process_learns(new_run: Callable[..., Run]) -> None:
    alone = new_run()
    for stage in ("data", "sft", "reward", "ppo"):
        bring_up(alone, stage)
    expected = {stage: weights(alone, stage) for stage in ("sft", "ppo")}
    price = "prices.usd_per_device_hour_by_pool={two: 36.0}"
    # another price retrains nothing, so what differs is in a section of the stage itself
    both = new_run(
        f"where.sft={TWO}", f"where.ppo={TWO}", price, "sft.log_every_steps=1", "ppo.sample_every_updates=1"
    )
    for stage in ("sft", "ppo"):
        assert bring_up(both, stage).cached is False
        for name, tensor in weights(both, stage).items():
            torch.testing.assert_close(tensor, expected[stage][name], atol=2e-5, rtol=0.0)
        ledger = read_ledger(both.root, both.params, both.run_id).stage(stage)
        assert ledger is not None
        assert ledger.world_size == 2
        assert ledger.usd == pytest.approx(2 * ledger.seconds * 36.0 / 3600), "both nodes are paid for"
        assert ledger.idle_usd == pytest.approx(0.0, abs=1e-9)


def test_a_stop_a_budget_and_a_lost_node_leave_a_checkpoint_that_others_go_on_from(
    new_run: Callable[..., Run], cluster: Cluster, tmp_path: Path
) -> None:
    placed = (*LONG, f"where.sft={TWO}")
    run = new_run(*placed)
    bring_up(run, "data")
    store = tmp_path / "store" / "checkpoints" / "sft"
    stop = StopRequest()
    asker = once(lambda: bool([*store.glob("*/*/step-*/manifest.json")]), lambda: stop.handle(signal.SIGINT, None))
    with pytest.raises(StageStopped, match="sft was asked to stop: checkpointed after step"):
        bring_up(run, "sft", stop)
    asker.join()
    assert [row.exit_code for row in attempts(run, "sft") if row.event == "end"] == [75]
    stopped_at = attempts(run, "sft")[-1].step

    poor = new_run(*placed, "budget.max_usd_by_stage={sft: 0.15}", "budget.gate=warn",
                   "prices.usd_per_device_hour_by_pool={two: 36.0}")  # fmt: skip
    with pytest.raises(OverBudget, match=r"budget\.max_usd_by_stage\.sft=0\.15"):
        bring_up(poor, "sft")

    again = new_run(*placed)
    resumed = len(attempts(again, "sft"))

    def is_beyond() -> bool:
        rows = attempts(again, "sft")[resumed:]
        return any(row.event == "resume" and row.step >= stopped_at for row in rows)

    def lose_a_node() -> None:
        cluster.kill_raylet(cluster.nodes[-1])
        cluster.add("two")

    killer = once(is_beyond, lose_a_node)
    done = bring_up(again, "sft")
    killer.join()
    rows = attempts(again, "sft")[resumed:]
    first, *_, last = [row.attempt for row in rows]
    assert done == Outcome(cached=False, attempt=last)
    assert last > first, "it went on in another attempt"
    assert "lost" in [row.event for row in rows if row.attempt == first] or rows[1].attempt != first
    for attempt in range(1, last + 1):
        assert steps(again, "sft", attempt) == sorted(set(steps(again, "sft", attempt))), "rows come once, in order"
    assert steps(again, "sft", last)[-1][0] == 1200
    assert not [*store.rglob("manifest.json")], "a stage that is done needs no checkpoint"
    homes = [*cluster.folder.glob("node-*/workspaces/*-*")]
    assert len([path for path in homes if path.is_dir()]) <= 1, "but for that of the lost node"


def test_what_a_cluster_lacks_is_one_line(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "START_SECONDS", 2.0)
    bring_up(new_run(), "data")
    for place, said in (
        ("{pool: three}", r"no node of the Ray cluster has the label pool=three \(ray start --labels pool=three\)"),
        ("{pool: one, nodes: 2, processes: 2}", r"nodes=2 with 1 CPU each, and those with the label pool=one have 1"),
    ):
        with pytest.raises(EnvironmentFault, match=said) as fault:
            bring_up(new_run(f"where.sft={place}"), "sft")
        assert "\n" not in str(fault.value)
    placed = new_run("where.sft={pool: one}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(EnvironmentFault, match="RAY_AUTH_MODE is not token"):
        bring_up(placed, "sft")
