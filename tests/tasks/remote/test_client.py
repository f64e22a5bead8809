"""A stage on a work pool, seen from the pipeline; the pool's containers are processes here, and the store is a
folder.
"""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.projects.checkouts import point_remote
from config import jsonl
from config.errors import EnvironmentFault, OverBudget, StageStopped
from config.load import load
from config.records import UsageRow
from costs.ledger.ledger import read_ledger
from tasks.dvc import transfers
from tasks.remote import client
from tasks.remote.client import check_placement, run_locally, run_remote
from tasks.run.exchange import REPLY, Exchange, Receiver
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.run.transient import TransientFault
from tasks.stage.outcome import Outcome, StageCrashed
from tests.conftest import ROOT
from tests.tasks.pool import LONG, Pool, attempts, when_checkpoint_arrives, when_resumed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.usefixtures("quick_stages")]

TINY = ROOT / "tests" / "e2e" / "tiny.yaml"


@pytest.fixture
def new_run(new_checkout: Callable[[], Path], tmp_path: Path) -> Callable[..., Run]:
    """Begins a pipeline run in one checkout, with its store; data and sft are on the pool."""
    root, names = new_checkout(), iter(range(10))
    point_remote(root, tmp_path / "store")

    def make(*changes: str) -> Run:
        return begin_run(
            root, f"run-{next(names)}", load(TINY, ["where.data.pool=gpus", "where.sft.pool=gpus", *changes]), {}
        )

    return make


def bring_up(run: Run, stage: str, stop: StopRequest | None = None) -> Outcome:
    return run_remote(run, stage, "gpus", stop or StopRequest(), lambda progress: None)


def test_a_stop_is_heard_while_a_container_is_awaited(new_run: Callable[..., Run], pool: Pool, tmp_path: Path) -> None:
    pool.is_full = True
    stop = StopRequest()
    run = new_run()
    asker = threading.Timer(3.0, lambda: stop.handle(signal.SIGINT, None))
    asker.start()
    with pytest.raises(StageStopped, match="before its container began"):
        bring_up(run, "data", stop)
    asker.join()
    assert len(pool.withdrawn) == 1
    assert not list((tmp_path / "store" / "exchange").rglob("*.json"))


def test_a_stage_elsewhere_is_killed_goes_on_is_preempted_and_is_then_unchanged(
    new_run: Callable[..., Run], pool: Pool, tmp_path: Path
) -> None:
    run = new_run(*LONG, "prices.usd_per_device_hour_by_pool={gpus: 36.0}")
    assert bring_up(run, "data") == Outcome(cached=False, attempt=1)
    assert (run.root / "metrics" / "data.json").is_file()
    assert not (run.root / "data" / "prepared").exists(), "data stays in the store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transfers, "transfer", lambda *_: pytest.fail("dvc was asked to push what the container had pushed")
        )
        assert transfers.push(run.root) is None

    killer = when_checkpoint_arrives(tmp_path, lambda: pool.strike(signal.SIGKILL))
    with pytest.raises(StageCrashed, match="on work pool gpus ended as Crashed without a reply"):
        bring_up(run, "sft")
    killer.join()
    assert [row.event for row in attempts(run, "sft")] == ["start", "lost"]

    preempter = when_resumed(run, "sft", lambda: pool.strike(signal.SIGTERM))
    outcome = bring_up(run, "sft")
    preempter.join()
    rows = attempts(run, "sft")
    resumed = [(row.attempt, row.step > 0) for row in rows if row.event == "resume"]
    assert (2, True) in resumed
    assert outcome == Outcome(cached=False, attempt=rows[-1].attempt)
    assert not list((tmp_path / "store" / "checkpoints").rglob("manifest.json"))
    assert not list((tmp_path / "store" / "exchange").rglob("*.json"))

    sft = read_ledger(run.root, run.params, run.run_id).stage("sft")
    usage = jsonl.read(run.root / "runs" / "sft" / "usage.jsonl", UsageRow).rows
    assert sft is not None
    assert sft.usd == pytest.approx(sft.seconds * 36.0 / 3600)
    assert sft.seconds > sum(row.seconds for row in usage), (
        "the time between the last row and the kill is paid for too"
    )
    assert sft.failed_attempts >= 1

    containers = len(pool.containers)
    again = new_run(*LONG)
    assert bring_up(again, "sft") == Outcome(cached=True, attempt=outcome.attempt, made_by="run-0")
    assert len(pool.containers) == containers


def test_a_stop_and_a_budget_reach_the_container(new_run: Callable[..., Run], pool: Pool, tmp_path: Path) -> None:
    run = new_run(*LONG)
    bring_up(run, "data")
    stop = StopRequest()
    asker = when_checkpoint_arrives(tmp_path, lambda: stop.handle(signal.SIGINT, None))
    with pytest.raises(StageStopped, match="sft was asked to stop: checkpointed after step"):
        bring_up(run, "sft", stop)
    asker.join()
    assert [row.exit_code for row in attempts(run, "sft") if row.event == "end"] == [75]
    poor = new_run(
        *LONG,
        "budget.max_usd_by_stage={sft: 0.05}",
        "prices.usd_per_device_hour_by_pool={gpus: 60.0}",
        "budget.gate=warn",
    )
    with pytest.raises(OverBudget, match=r"budget\.max_usd_by_stage\.sft=0\.05"):
        bring_up(poor, "sft")
    containers = len(pool.containers)
    broke = new_run(*LONG, "budget.max_usd_by_stage={sft: 1.0e-9}", "budget.gate=warn")
    with pytest.raises(OverBudget, match="leaves no room to start sft"):
        bring_up(broke, "sft")
    assert len(pool.containers) == containers, "none is left running that nobody follows"


def test_a_store_that_is_away_for_a_while_is_waited_for_and_the_stage_then_stopped(
    new_run: Callable[..., Run], pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    received, away = Receiver.receive, iter(range(3))

    def receive(receiver: Receiver) -> bool:
        if next(away, None) is not None:
            raise TransientFault("the store is away")  # a quick stage has ended by then
        return received(receiver)

    def read(exchange: Exchange, name: str) -> bytes | None:
        if name == REPLY and next(reply_away, None) is not None:
            raise TransientFault("the store is away again")
        return read_itself(exchange, name)

    def remove(exchange: Exchange, name: str) -> None:
        raise TransientFault("the store is away once more")

    read_itself, reply_away = Exchange.read, iter(range(2))
    monkeypatch.setattr(Receiver, "receive", receive)
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "read", read)
        patch.setattr(Exchange, "remove", remove)
        assert bring_up(new_run(), "data") == Outcome(cached=False, attempt=1)
    assert next(away, None) is None
    assert next(reply_away, None) is None
    away = iter(range(10**9))
    monkeypatch.setattr(client, "STORE_PATIENCE_SECONDS", 0.0)
    changed = new_run("data.max_prompt_chars=500")
    with pytest.raises(EnvironmentFault, match="the store is away"):
        bring_up(changed, "data")
    (stop,) = (tmp_path / "store" / "exchange" / changed.run_id).glob("data-*/stop")
    assert stop.read_bytes() == b"1"


def test_a_local_stage_takes_its_inputs_from_the_store(new_run: Callable[..., Run], pool: Pool) -> None:
    run = new_run("where.sft.pool=local")
    bring_up(run, "data")
    outcome = run_locally(run, "sft", StopRequest(), lambda progress: None)
    assert outcome == Outcome(cached=False, attempt=1)
    assert (run.root / "data" / "prepared" / "sft").is_dir()
    assert not (run.root / "data" / "prepared" / "preference").exists()


def test_a_pool_that_can_do_nothing_is_told_before_anything_is_done(
    new_run: Callable[..., Run], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "require_served", lambda pool, key: None)
    run = new_run("prices.device_by_pool={gpus: a100-80}")
    with pytest.raises(
        EnvironmentFault, match=r"work pool gpus cannot run any stage: .*no GPU is in its container"
    ) as fault:
        check_placement(run, ["data", "sft"])
    assert "\n" not in str(fault.value)
    assert attempts(run, "data") == []
    unmounted = new_run("data.source={kind: file, path: /volume/pairs.jsonl, format: pairs, columns: {}}")
    with pytest.raises(
        EnvironmentFault,
        match=r"gpus cannot run any stage: data\.source\.path=/volume/pairs\.jsonl is not in the "
        r"container",
    ):
        check_placement(unmounted, ["data", "sft"])
