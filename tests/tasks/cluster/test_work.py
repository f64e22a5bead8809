"""The stage's process on a node, here in this process and with a folder as store."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from config.errors import EnvironmentFault
from config.load import load
from config.ports import free_port
from tasks.cluster import work
from tasks.cluster.node import OFFSETS, REQUEST
from tasks.cluster.work import Reply
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.run.store import Store
from tasks.run.transient import TransientFault, UnknownFault
from tasks.run.workspace import lay_out
from tasks.stage.outcome import Outcome
from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.usefixtures("quick_stages")]

Ask = Callable[..., Reply]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Does a request in a workspace as the actor makes it; the pipeline has all rows at once."""

    def ask(stage: str, store: str = str(tmp_path / "store"), lock: str = "", node: int = 0) -> Reply:
        root = tmp_path / "workspaces" / stage
        shutil.rmtree(root, ignore_errors=True)
        request = {
            "run_id": "run-1", "stage": stage, "node": node, "launch": [], "changed_code": "restart",
            "remote": {"name": "store", "url": store},
        }  # fmt: skip
        lay_out(root, request["remote"], tmp_path / "cache" / "dvc")
        begin_run(root, "run-1", load(ROOT / "tests" / "e2e" / "tiny.yaml"), {})
        (root / OFFSETS).write_text(json.dumps(dict.fromkeys(work.ROWS, 10**12)))
        if lock:
            (root / "dvc.lock").write_text(lock)
        return work._answer(root, request, StopRequest())

    return ask


def test_a_stage_is_done_with_nothing_but_the_request_and_the_store(ask: Ask, tmp_path: Path) -> None:
    reply = ask("data")
    assert (reply.kind, reply.attempt, reply.cached) == ("done", 1, False), reply
    outs = {out["path"]: out["md5"] for out in yaml.safe_load(reply.lock)["stages"]["data"]["outs"]}
    listed = tmp_path / "store" / "files" / "md5" / outs["data/prepared"][:2] / outs["data/prepared"][2:]
    assert any(entry["relpath"] == "sft/train.jsonl" for entry in json.loads(listed.read_text()))
    # the next one has its inputs from the store alone
    shutil.rmtree(tmp_path / "cache")
    again = ask("sft", lock=reply.lock)
    assert (again.kind, again.attempt) == ("done", 1), again
    assert set(yaml.safe_load(again.lock)["stages"]) == {"data", "sft"}


def test_what_an_orphan_has_done_is_done_again_with_its_rows(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(work, "PARENT", -1)  # the actor is gone
        assert ask("data").kind == "stopped"
    assert not (tmp_path / "store").exists(), "what it made would be reused, and its rows are in no ledger"
    again = ask("data")
    assert (again.kind, again.cached) == ("done", False), "nor from the cache of the node"


def test_a_mistake_of_the_user_is_the_stages_own_line(ask: Ask) -> None:
    for node in (0, 1):
        reply = ask("sft", node=node)
        assert reply.kind == "bad_input", reply
        assert "\n" not in reply.message
        assert "data/" in reply.message


def fill(source: str, target: str) -> None:
    with Path("/dev/full").open("w", buffering=1) as file:
        file.write("no byte fits\n")


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_disk_that_fills_up_is_no_crash_to_be_tried_again(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    def fetch(root: Path, paths: object) -> None:
        if by == "file":
            fill("", "")
        shutil.copytree(root / "config", tmp_path / "copy", copy_function=fill)

    monkeypatch.setattr(work, "fetch", fetch)
    reply = ask("data")
    assert (reply.kind, "is full. Free some space on it." in reply.message) == ("bad_input", True), reply


def test_a_stage_whose_store_goes_away_when_it_is_done_is_not_lost(
    ask: Ask, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])

    def run_stage(*arguments: Any) -> Outcome:
        outcome = run_stage_itself(*arguments)
        # it was there until now
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").list_buckets()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        threading.Timer(8, lambda: monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")).start()
        return outcome

    run_stage_itself = work.run_stage
    monkeypatch.setattr(work, "run_stage", run_stage)
    reply = ask("data", s3)
    assert (reply.kind, reply.attempt) == ("done", 1), reply
    digest = {out["path"]: out["md5"] for out in yaml.safe_load(reply.lock)["stages"]["data"]["outs"]}["data/prepared"]
    assert Store(s3).names(f"files/md5/{digest[:2]}")


@pytest.mark.parametrize(
    ("met", "requests", "kind"),
    [
        (TransientFault("the store is away."), 1, "stopped"),
        (UnknownFault("what is this."), 0, "crashed"),
        (EnvironmentFault("no bucket."), 0, "bad_input"),
    ],
)
def test_outputs_that_could_not_be_sent_are_no_mistake_of_the_user_unless_they_are_one(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, met: EnvironmentFault, requests: int, kind: str
) -> None:
    def send_outputs(root: Path, stage: str) -> None:
        raise met

    def run_stage(run: Run, stage: str, stop: StopRequest, *others: object) -> Outcome:
        stop.requests = requests
        return Outcome(cached=False, attempt=1)

    monkeypatch.setattr(work, "send_outputs", send_outputs)
    monkeypatch.setattr(work, "run_stage", run_stage)
    reply = ask("data")
    assert (reply.kind, reply.message) == (
        kind,
        f"data is done, but its outputs could not be sent: {met} It resumes from its last checkpoint.",
    )


def test_a_checkpoint_whose_rows_nobody_takes_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "sft"
    folder.mkdir(parents=True)
    (folder / "usage.jsonl").write_text("row\n")
    (tmp_path / OFFSETS).write_text(json.dumps({"usage.jsonl": 4}))
    assert work._are_taken(tmp_path, "sft")
    (folder / "usage.jsonl").write_text("row\nrow\n")
    taker = threading.Timer(1.0, lambda: (tmp_path / OFFSETS).write_text(json.dumps({"usage.jsonl": 8})))
    taker.start()
    assert work._are_taken(tmp_path, "sft")
    (folder / "metrics.jsonl").write_text("row\n")
    monkeypatch.setattr(work, "PARENT", -1)  # the actor is gone
    assert not work._are_taken(tmp_path, "sft")


def test_a_reply_of_another_version_may_hold_more() -> None:
    reply = Reply("done", attempt=2, lock="x")
    assert Reply.of(json.dumps({**reply._asdict(), "later": 1}).encode()) == reply
    assert REQUEST == "request.json"
