"""A stage on nodes of a Ray cluster; the nodes are processes of this machine with folders of their own, and the store
is a folder.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.projects.checkouts import point_remote
from benchmarks.projects.ray_nodes import Cluster
from config import jsonl
from config.errors import EnvironmentFault, OverBudget, StageStopped
from config.load import load
from config.records import MetricRow
from costs.ledger.ledger import read_ledger
from tasks.cluster import driver
from tasks.cluster.driver import run_placed
from tasks.dvc.pull import remote_of
from tasks.dvc.transfers import fetch
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.runner import run_stage
from tests.conftest import ROOT
from tests.tasks.cluster.waits import LONG, attempts, once, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.xdist_group("ray")]

TINY = ROOT / "tests" / "e2e" / "tiny.yaml"
TWO = "{pool: two, nodes: 2, processes: 2, sharding: zero3}"
STEPS = 700
PLAIN_TWO = "{pool: two, nodes: 2, processes: 2}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    result = Cluster(tmp_path_factory.mktemp("cluster"))
    result.add("one")
    for _ in range(2):
        result.add("two")
    with pytest.MonkeyPatch.context() as patch:  # Ray reads its variables when it is imported
        for name, value in result.variables.items():
            patch.setenv(name, value)
        yield result
    result.stop()


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
    def bring_up_all(*changes: str) -> Iterator[tuple[str, Run]]:
        for method, stages in (("ppo", ("data", "sft", "reward", "ppo")), ("dpo", ("dpo",))):
            run = new_run(f"align.method={method}", *changes)
            for stage in stages:
                bring_up(run, stage)
                yield stage, run

    expected = {stage: weights(run, stage) for stage, run in bring_up_all() if stage != "data"}
    # another price retrains nothing, so what differs is in a section of the stage itself
    changes = [
        *(f"where.{stage}={TWO if stage in ('sft', 'ppo') else PLAIN_TWO}" for stage in expected),
        *(f"{stage}.log_every_steps=1" for stage in ("sft", "reward", "dpo")), "ppo.sample_every_updates=1",
        "prices.usd_per_device_hour_by_pool={two: 36.0}",
    ]  # fmt: skip
    for stage, run in bring_up_all(*changes):
        if stage == "data":
            continue
        for name, tensor in weights(run, stage).items():
            torch.testing.assert_close(tensor, expected[stage][name], atol=2e-5, rtol=0.0)
        ledger = read_ledger(run.root, run.params, run.run_id).stage(stage)
        assert ledger is not None
        assert ledger.world_size == 2
        assert ledger.usd == pytest.approx(2 * ledger.seconds * 36.0 / 3600), "both nodes are paid for"
        assert ledger.idle_usd == pytest.approx(0.0, abs=1e-9)


def test_a_stop_and_a_budget_leave_a_checkpoint_that_others_go_on_from(
    new_run: Callable[..., Run], tmp_path: Path
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
    # on a busy machine the budget may be spent before it has resumed
    assert all(row.step >= stopped_at for row in attempts(poor, "sft") if row.event == "resume")


def test_whatever_dies_or_is_drained_costs_no_more_than_the_way_from_the_last_checkpoint(
    new_run: Callable[..., Run], cluster: Cluster
) -> None:
    long = (*LONG, f"sft.max_steps={STEPS}")
    alone = new_run(*long, "where.sft={processes: 2, sharding: zero3}")
    bring_up(alone, "data")
    bring_up(alone, "sft")
    expected = weights(alone, "sft")
    run = new_run(*long, f"where.sft={TWO}", "sft.log_every_steps=1")
    first = len(attempts(run, "sft"))

    def is_at_work() -> bool:
        """Whether the newest attempt has gone beyond its next checkpoints."""
        rows = attempts(run, "sft")[first:]
        trained = steps(run, "sft", rows[-1].attempt) if rows and rows[-1].event != "end" else []
        return len(trained) > 60

    killer = once(is_at_work, kill_a_rank)
    with pytest.raises(StageCrashed):
        bring_up(run, "sft")
    killer.join()

    struck: list[int] = []

    def strike_in_turn() -> None:
        for strike in (lambda: drain_a_node(cluster), kill_an_actor, lambda: lose_a_node(cluster)):
            struck.append(attempts(run, "sft")[-1].attempt)
            strike()
            seen = len(struck)
            until(lambda seen=seen: is_at_work() and attempts(run, "sft")[-1].attempt > struck[seen - 1])

    striker = once(lambda: is_at_work() and attempts(run, "sft")[-1].event != "lost", strike_in_turn)
    done = bring_up(run, "sft")
    striker.join()
    rows = attempts(run, "sft")[first:]
    numbers = sorted({row.attempt for row in rows})
    assert len(numbers) >= 5, "a rank, a drained node, an actor and a raylet: an attempt each, and the last"
    assert done == Outcome(cached=False, attempt=numbers[-1])
    for attempt in numbers:
        assert steps(run, "sft", attempt) == sorted(set(steps(run, "sft", attempt))), "rows come once, in order"
    drained = steps(run, "sft", struck[0])
    assert steps(run, "sft", struck[0] + 1)[0][0] == drained[-1][0] + 1, "what was drained did nothing in vain"
    assert {step for attempt in numbers for step, _ in steps(run, "sft", attempt)} == set(range(1, STEPS + 1))
    for name, tensor in weights(run, "sft").items():
        assert torch.equal(tensor, expected[name]), "the bits of two processes here, undisturbed"
    assert not [*Path(remote_of(run.root)["url"]).glob("checkpoints/sft/**/manifest.json")], "done: none is needed"


def kill_a_rank() -> None:
    kill("-m training.sft")


def kill_an_actor() -> None:
    kill("ray::Node")


def kill(words: str) -> None:
    """kill -9 to a process of the nodes whose command line has these words."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        if words in line and "RLHF_WORKSPACES" in (process.info["environ"] or {}):
            process.kill()
            return
    raise AssertionError(f"no process of {words}")


def drain_a_node(cluster: Cluster) -> None:
    """As ray drain-node does on one of the two nodes of the pool, once there is a third."""
    import ray
    from ray.core.generated import autoscaler_pb2

    node = next(node for node in ray.nodes() if node["Alive"] and node["Labels"].get("pool") == "two")
    cluster.add("two")
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    ray._raylet.GcsClient(address=cluster.address).drain_node(node["NodeID"], reason, "shutting down", 0)


def lose_a_node(cluster: Cluster) -> None:
    cluster.kill_raylet(cluster.nodes[-1])
    cluster.add("two")


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
