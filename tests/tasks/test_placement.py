"""A stage on a work pool, seen from the pipeline; the pool's containers are processes here, and the store is a folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest
from prefect.states import Completed, Crashed, Running

from config import jsonl
from config.errors import EnvironmentFault, OverBudget, StageStopped
from config.load import load
from config.records import AttemptRow, UsageRow
from costs.ledger import ledger
from tasks import placement, validity
from tasks.outcome import Outcome, StageCrashed
from tasks.placement import check_places, run_here, run_placed
from tasks.run import Run, begin
from tasks.stop import StopRequest
from tests.conftest import ROOT, own_remote

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

TINY = ROOT / "tests" / "e2e" / "tiny.yaml"
CONTAINER = (
    "import sys; from tasks.placed import work; from tasks.stop import on_signals\nwith on_signals() as stop: work(sys.argv[1], stop)"
)
LONG = ("sft.epochs=100.0", "sft.max_steps=600", "sft.checkpoint_every_steps=20")


class Pool:
    """Stands for Prefect and a worker: each request becomes a process with the environment of a container."""

    def __init__(self, folder: Path) -> None:
        self.containers: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def hand_over(self, pool: str, request: str, name: str) -> SimpleNamespace:
        variables = {
            "RLHF_WORKSPACES": str(self._folder / "workspaces"),
            "RLHF_CACHE": str(self._folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        with (self._folder / "container.log").open("ab") as log:
            self.containers.append(
                subprocess.Popen(
                    [sys.executable, "-c", CONTAINER, request], env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
                )
            )
        return SimpleNamespace(id=uuid4())

    def state_of(self, flow_run: object) -> object:
        match self.containers[-1].poll():
            case None:
                return Running()
            case 0:
                return Completed()
            case code:
                return Crashed(message=f"exit code {code}")

    def strike(self, number: int) -> None:
        """A signal to the newest container: SIGKILL to all of it, SIGTERM to its first process, as engines do."""
        container = self.containers[-1]
        if number == signal.SIGTERM:
            container.send_signal(number)
            return
        for process in [*psutil.Process(container.pid).children(recursive=True), psutil.Process(container.pid)]:
            process.kill()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool(tmp_path)
    monkeypatch.setattr(placement, "hand_over", made.hand_over)
    monkeypatch.setattr(placement, "state_of", made.state_of)
    monkeypatch.setattr(placement, "STATE_EVERY_SECONDS", 0.5)
    yield made
    for container in made.containers:
        container.wait(60)


@pytest.fixture
def new_run(new_checkout: Callable[[], Path], tmp_path: Path) -> Callable[..., Run]:
    """Begins a pipeline run in one checkout, with its store; data and sft are on the pool."""
    root, names = new_checkout(), iter(range(10))
    own_remote(root, tmp_path / "store")

    def make(*changes: str) -> Run:
        return begin(root, f"run-{next(names)}", load(TINY, ["placement.data=gpus", "placement.sft=gpus", *changes]), {})

    return make


def bring_up(run: Run, stage: str, stop: StopRequest | None = None) -> Outcome:
    return run_placed(run, stage, "gpus", stop or StopRequest(), lambda progress: None)


def attempts(run: Run, stage: str) -> list[AttemptRow]:
    return jsonl.read(run.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


def when_mirrored(folder: Path, action: Callable[[], None]) -> threading.Thread:
    """Do something once a checkpoint is whole in the store."""

    def wait() -> None:
        deadline = time.monotonic() + 600
        while not list((folder / "store" / "checkpoints").glob("sft/*/step-*/manifest.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_stage_elsewhere_is_killed_goes_on_is_preempted_and_is_then_unchanged(
    new_run: Callable[..., Run], pool: Pool, tmp_path: Path
) -> None:
    run = new_run(*LONG, "prices.usd_per_device_hour_by_pool={gpus: 36.0}")
    assert bring_up(run, "data") == Outcome(cached=False, attempt=1)
    assert (run.root / "metrics" / "data.json").is_file()
    assert not (run.root / "data" / "prepared").exists(), "data stays in the store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity, "environment", lambda: pytest.fail("dvc was asked to push what the container had pushed"))
        assert validity.push(run.root) is None

    killer = when_mirrored(tmp_path, lambda: pool.strike(signal.SIGKILL))
    with pytest.raises(StageCrashed, match="on work pool gpus ended as Crashed without a word"):
        bring_up(run, "sft")
    killer.join()
    assert [row.event for row in attempts(run, "sft")] == ["start", "lost"]

    preempter = when_mirrored(tmp_path, lambda: (time.sleep(8), pool.strike(signal.SIGTERM))[-1])
    outcome = bring_up(run, "sft")
    preempter.join()
    rows = attempts(run, "sft")
    resumed = [(row.attempt, row.step > 0) for row in rows if row.event == "resume"]
    assert (2, True) in resumed
    assert outcome == Outcome(cached=False, attempt=rows[-1].attempt)
    assert not list((tmp_path / "store" / "checkpoints").rglob("manifest.json"))
    assert not list((tmp_path / "store" / "exchange").rglob("*.json"))

    sft = ledger(run.root, run.params, run.run_id).stage("sft")
    usage = jsonl.read(run.root / "runs" / "sft" / "usage.jsonl", UsageRow).rows
    assert sft is not None
    assert sft.usd == pytest.approx(sft.seconds * 36.0 / 3600)
    assert sft.seconds > sum(row.seconds for row in usage), "the time between the last row and the kill is paid for too"
    assert sft.failed_attempts >= 1

    containers = len(pool.containers)
    again = new_run(*LONG)
    assert bring_up(again, "sft") == Outcome(cached=True, attempt=outcome.attempt)
    assert len(pool.containers) == containers


def test_a_stop_and_a_budget_reach_the_container(new_run: Callable[..., Run], pool: Pool, tmp_path: Path) -> None:
    run = new_run(*LONG)
    bring_up(run, "data")
    stop = StopRequest()
    asker = when_mirrored(tmp_path, lambda: stop.handle(signal.SIGINT, None))
    with pytest.raises(StageStopped, match="sft was asked to stop: checkpointed after step"):
        bring_up(run, "sft", stop)
    asker.join()
    assert [row.exit_code for row in attempts(run, "sft") if row.event == "end"] == [75]
    poor = new_run(*LONG, "budget.max_usd_by_stage={sft: 0.05}", "prices.usd_per_device_hour_by_pool={gpus: 60.0}", "budget.gate=warn")
    with pytest.raises(OverBudget, match=r"budget\.max_usd_by_stage\.sft=0\.05"):
        bring_up(poor, "sft")


def test_a_local_stage_takes_its_inputs_from_the_store(new_run: Callable[..., Run], pool: Pool) -> None:
    run = new_run("placement.sft=local")
    bring_up(run, "data")
    outcome = run_here(run, "sft", StopRequest(), lambda progress: None)
    assert outcome == Outcome(cached=False, attempt=1)
    assert (run.root / "data" / "prepared" / "sft").is_dir()
    assert not (run.root / "data" / "prepared" / "preference").exists()


def test_a_pool_that_can_do_nothing_is_told_before_anything_is_done(
    new_run: Callable[..., Run], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "require_served", lambda pool, key: None)
    run = new_run("prices.device_by_pool={gpus: a100-80}")
    with pytest.raises(EnvironmentFault, match=r"work pool gpus can do no stage: .*no GPU is in its container") as fault:
        check_places(run, ["data", "sft"])
    assert "\n" not in str(fault.value)
    assert attempts(run, "data") == []
    unmounted = new_run("data.source={kind: file, path: /volume/pairs.jsonl, format: pairs, columns: {}}")
    with pytest.raises(EnvironmentFault, match=r"gpus can do no stage: data\.source\.path=/volume/pairs\.jsonl is not in the container"):
        check_places(unmounted, ["data", "sft"])
