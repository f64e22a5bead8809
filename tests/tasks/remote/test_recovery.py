"""A pipeline that is killed: its stage in a container notices and stops, and the next run goes on from there."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.projects.checkouts import point_remote
from config import jsonl
from config.errors import EnvironmentFault, UserError
from config.load import load
from config.records import AttemptRow, UsageRow
from tasks.remote import heartbeat, recovery
from tasks.remote.client import run_locally, run_remote
from tasks.remote.heartbeat import CONTAINER, PIPELINE, Heartbeat, HeartbeatMonitor, heartbeats
from tasks.remote.recovery import ask_to_stop, recover_abandoned
from tasks.remote.worker import STOP, Reply
from tasks.run.exchange import REPLY, REQUEST, Exchange, Sender
from tasks.run.run import Run, begin_run, end_left_open
from tasks.run.stop import StopRequest
from tasks.run.transient import TransientFault
from tests.conftest import ROOT, TINY
from tests.support.stage_project import make_project
from tests.tasks.pool import LONG, Pool, attempts, when_checkpoint_arrives

DOOMED = """
import sys
from pathlib import Path
from config.load import load
from tasks.remote import client, heartbeat
from tasks.remote.client import run_locally, run_remote
from tasks.run.run import begin_run
from tasks.run.stop import StopRequest
from tests.tasks.pool import Pool

folder = Path(sys.argv[1])
heartbeat.EVERY_SECONDS, heartbeat.SILENCE_SECONDS = 0.5, float(sys.argv[2])
pool = Pool(folder)
client.submit, client.state_of = pool.submit, pool.state_of
run = begin_run(Path.cwd(), "doomed", load(Path("params.yaml")), {})
for stage in ("data", "sft"):
    run_remote(run, stage, "gpus", StopRequest(), lambda progress: None)
"""
"""A pipeline in a process of its own, to be killed. Its containers outlive it."""


@pytest.fixture
def root(new_checkout: Callable[[], Path], tmp_path: Path) -> Path:
    checkout = new_checkout()
    point_remote(checkout, tmp_path / "store")
    return checkout


def killed_pipeline(root: Path, folder: Path, silence_seconds: float) -> list[psutil.Process]:
    """What a pipeline left running that was killed while its stage sft had sent a checkpoint to the store."""
    params = load(TINY, ["where.data.pool=gpus", "where.sft.pool=gpus", *LONG])
    (root / "params.yaml").write_text(json.dumps(params.model_dump(mode="json")))
    process = subprocess.Popen(
        [sys.executable, "-c", DOOMED, str(folder), str(silence_seconds)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        when_checkpoint_arrives(folder, lambda: None).join()
        exchange = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait()
    end_left_open(root)  # as the next run does once it holds the checkout
    return exchange


def has_each_row_once(root: Path, stage: str) -> bool:
    rows = [
        (row.attempt, row.step, row.phase, row.time)
        for row in jsonl.read(root / "runs" / stage / "usage.jsonl", UsageRow).rows
    ]
    return len(rows) == len(set(rows))


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_killed_pipelines_stage_stops_by_itself_and_the_next_run_goes_on_from_its_checkpoint(
    root: Path, pool: Pool, tmp_path: Path
) -> None:
    exchange = killed_pipeline(root, tmp_path, silence_seconds=3.0)
    assert len(exchange) == 1
    assert not psutil.wait_procs(exchange, timeout=120)[1]
    (reply,) = (
        Reply.of(path.read_bytes()) for path in (tmp_path / "store" / "exchange" / "doomed").glob(f"sft-*/{REPLY}")
    )
    assert reply.kind == "stopped"
    run = begin_run(root, "next", load(root / "params.yaml"), {})
    run_remote(run, "sft", "gpus", StopRequest(), lambda progress: None)
    end = end_of_the_first_attempt(run)
    assert [(row.attempt, row.step) for row in attempts(run, "sft") if row.event == "resume"] == [(2, end.step)]
    assert has_each_row_once(root, "sft")
    assert not list((tmp_path / "store" / "exchange").rglob("*.json"))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_run_that_comes_before_the_stage_has_noticed_lets_it_checkpoint_first(
    root: Path, pool: Pool, tmp_path: Path, new_checkout: Callable[[], Path]
) -> None:
    exchange = killed_pipeline(root, tmp_path, silence_seconds=3600.0)
    run = begin_run(root, "next", load(root / "params.yaml"), {})
    assert recover_abandoned(run, "sft", StopRequest()) is None
    assert not psutil.wait_procs(exchange, timeout=20)[1], "no two containers do one stage"
    end = end_of_the_first_attempt(run)
    assert has_each_row_once(root, "sft")
    assert not list((tmp_path / "store" / "exchange").rglob("*.json"))

    # as a new run of the deployment: a workspace of its own, with the lock and no rows
    elsewhere = new_checkout()
    point_remote(elsewhere, tmp_path / "store")
    shutil.copyfile(root / "dvc.lock", elsewhere / "dvc.lock")
    deployed = begin_run(elsewhere, "deployed", load(root / "params.yaml"), {})
    run_remote(deployed, "sft", "gpus", StopRequest(), lambda progress: None)
    assert [(row.attempt, row.step) for row in attempts(deployed, "sft") if row.event == "resume"] == [(1, end.step)]
    assert not any(path.is_file() for path in (tmp_path / "store" / "checkpoints").rglob("*"))


def end_of_the_first_attempt(run: Run) -> AttemptRow:
    """That it was stopped with a checkpoint, recorded under the name of the run that was killed."""
    (end,) = (row for row in attempts(run, "sft") if row.event == "end" and row.attempt == 1)
    assert (end.exit_code, end.run_id) == (75, "doomed")
    assert end.step > 0
    return end


# ---------------------------------------------------------------- what is left, without a container


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", tmp_path / "remote", ["data", "sft"])


@pytest.fixture
def run(project: Path) -> Run:
    """The run after one that was killed."""
    begin_run(project, "killed", load(TINY), {})
    end_left_open(project)
    return begin_run(project, "next", load(TINY), {})


def leave(run: Run, stage: str, lock: str | None, reply: Reply | None, run_id: str = "killed") -> Exchange:
    """What the pipeline `run_id` left in the store."""
    exchange = Exchange(f"{run.root.parent}/remote/exchange/{run_id}/{stage}-1")
    exchange.write(REQUEST, json.dumps({"files": {"dvc.lock": lock} if lock is not None else {}}).encode())
    if reply is not None:
        exchange.write(REPLY, json.dumps(reply._asdict()).encode())
    return exchange


def test_a_stage_that_came_to_its_end_meanwhile_is_not_done_again(run: Run) -> None:
    done = Reply("done", attempt=1, lock="new: lock")
    leave(run, "sft", None, done)
    assert recover_abandoned(run, "sft", StopRequest()) == "new: lock"
    (run.root / "dvc.lock").write_text("here: lock")
    leave(run, "sft", "here: lock", done)
    assert recover_abandoned(run, "sft", StopRequest()) == "new: lock"
    leave(run, "sft", "other: lock", done)
    assert recover_abandoned(run, "sft", StopRequest()) is None, "what was done meanwhile must not be forgotten"
    leave(run, "sft", "here: lock", Reply("stopped"))
    assert recover_abandoned(run, "sft", StopRequest()) is None


def test_the_lock_of_what_came_to_its_end_is_here_before_it_is_gone_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(exchange: Exchange, name: str) -> None:
        there.append((run.root / "dvc.lock").read_text())
        raise TransientFault("the store is away")

    there: list[str] = []
    monkeypatch.setattr(Exchange, "remove", remove)
    leave(run, "sft", None, Reply("done", attempt=1, lock="new: lock"))
    with suppress(UserError):  # this project has no such stage to run
        run_locally(run, "sft", StopRequest(), lambda progress: None)
    assert there == ["new: lock"]


def test_only_what_is_of_this_stage_and_of_a_killed_run_is_touched(run: Run) -> None:
    others = [leave(run, "data", None, Reply("done")), leave(run, "sft", None, None, "somebody-elses")]
    assert recover_abandoned(run, "sft", StopRequest()) is None
    assert [other.names() for other in others] == [[REPLY, REQUEST], [REQUEST]]


def test_all_that_is_still_at_work_is_asked_to_stop_before_anything_needs_its_machine(run: Run) -> None:
    exchange = [
        leave(run, "data", None, Reply("done")),
        leave(run, "sft", None, None),
        leave(run, "dpo", None, None),
        leave(run, "sft", None, None, "x"),
    ]
    ask_to_stop(run)
    assert [other.read(STOP) for other in exchange] == [None, b"1", b"1", None]


def test_rows_that_the_killed_run_had_taken_are_not_taken_twice(run: Run) -> None:
    exchange = leave(run, "sft", None, Reply("stopped"))
    there, here = run.root.parent / "container", run.root / "runs" / "sft" / "usage.jsonl"
    there.mkdir()
    sender = Sender(there, exchange, ["usage.jsonl"])
    for text in ("1\n2\n", "3\n"):
        with (there / "usage.jsonl").open("a") as file:
            file.write(text)
        sender.send()
    here.parent.mkdir(parents=True)
    here.write_text("0\n1\n2\n")
    recover_abandoned(run, "sft", StopRequest())
    assert here.read_text() == "0\n1\n2\n3\n"


def test_a_container_that_is_not_heard_of_is_waited_for_only_a_while(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "GONE_SECONDS", 2.5)
    exchange = leave(run, "sft", None, None)
    began, sign, stops = time.monotonic(), Heartbeat(exchange, CONTAINER, 0.0), []

    def alive() -> None:
        while time.monotonic() - began < 3:
            sign.show()
            stops.append(exchange.read(STOP))
            time.sleep(0.2)

    thread = threading.Thread(target=alive)
    thread.start()
    assert recover_abandoned(run, "sft", StopRequest()) is None
    thread.join()
    assert stops[-1] == b"1"
    assert time.monotonic() - began > 5
    assert exchange.names() == []


# ---------------------------------------------------------------- heartbeats


def test_silence_is_counted_from_the_last_sign_and_anew_after_the_store_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    exchange = Exchange(str(tmp_path / "exchange"))
    silence, sign = HeartbeatMonitor(exchange, PIPELINE), Heartbeat(exchange, PIPELINE, 10.0)
    sign.show()
    for now[0], seconds in ((5.0, 0.0), (9.0, 4.0)):
        assert silence.seconds() == seconds
    sign.show()
    assert silence.seconds() == 4.0, "it was not due yet"
    now[0] = 11.0
    sign.show()
    assert silence.seconds() == 0.0
    now[0] = 300.0
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "read", lambda *_: (_ for _ in ()).throw(EnvironmentFault("away")))
        with pytest.raises(EnvironmentFault):
            silence.seconds()
    now[0] = 301.0
    assert silence.seconds() == 1.0


def test_a_container_shows_that_it_is_there_and_hears_when_its_pipeline_is_not(tmp_path: Path) -> None:
    exchange, heard = Exchange(str(tmp_path / "exchange")), []
    sign = Heartbeat(exchange, PIPELINE, 0.0)
    with heartbeats(exchange, 0.05, 1.0, lambda: heard.append(exchange.read(CONTAINER))):
        for _ in range(30):
            sign.show()
            time.sleep(0.05)
        assert heard == []
        time.sleep(1.5)
    assert len(heard) == 1
    assert int(heard[0] or 0) > 5
