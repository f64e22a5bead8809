"""What happens in the container of a stage, here in this process and with a folder as store: only the container is
missing.
"""

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

from config import jsonl
from config.errors import EnvironmentFault
from config.load import load
from config.ports import free_port
from config.records import AttemptRow
from config.schema import Params
from flows.stage import _state
from tasks.remote import worker
from tasks.remote.checkpoints import CheckpointStore
from tasks.remote.worker import Reply, request_of, work
from tasks.run.code_version import code_digest
from tasks.run.exchange import REPLY, REQUEST, Exchange, Receiver, dump
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.run.transient import TransientFault, UnknownFault
from tasks.stage.outcome import Outcome
from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.usefixtures("quick_stages")]

Ask = Callable[..., Reply]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A pipeline at its start, in a folder that has neither data nor models."""
    monkeypatch.setenv("RLHF_WORKSPACES", str(tmp_path / "workspaces"))
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(worker, "ALIVE", tmp_path / "alive")
    monkeypatch.setattr(worker, "LOWEST_FREE_BYTES", 0)
    params: Params = load(ROOT / "tests" / "e2e" / "tiny.yaml")
    root = tmp_path / "pipeline"
    root.mkdir()
    return begin_run(root, "run-1", params, {})


@pytest.fixture
def ask(run: Run, tmp_path: Path) -> Ask:
    """Puts a request into the store and does it, as the flow of the container would."""

    def ask(stage: str | None, identity: str, **changes: Any) -> Reply:
        store = str(tmp_path / "store")
        exchange = Exchange(f"{store}/exchange/{run.run_id}/{identity}")
        request = request_of(run, stage, "pool", identity, {"name": "store", "url": store}) | changes
        exchange.write(REQUEST, dump(request))
        reply = work(exchange.url, StopRequest())
        assert json.loads(exchange.read(REPLY) or b"") == reply._asdict()
        Receiver(run.root / "runs" / (stage or "check"), exchange).receive()
        return reply

    return ask


def attempts(run: Run, stage: str) -> list[AttemptRow]:
    return jsonl.read(run.root / "runs" / stage / "attempts.jsonl", AttemptRow).rows


def test_a_stage_is_done_with_nothing_but_the_request_and_the_store(run: Run, ask: Ask, tmp_path: Path) -> None:
    reply = ask("data", "data-1")
    assert (reply.kind, reply.attempt, reply.cached) == ("done", 1, False)
    outs = {out["path"]: out["md5"] for out in yaml.safe_load(reply.lock)["stages"]["data"]["outs"]}
    listed = tmp_path / "store" / "files" / "md5" / outs["data/prepared"][:2] / outs["data/prepared"][2:]
    assert any(entry["relpath"] == "sft/train.jsonl" for entry in json.loads(listed.read_text()))
    assert [(row.event, row.exit_code) for row in attempts(run, "data")] == [("start", None), ("end", 0)]
    assert (run.root / "runs" / "data" / "usage.jsonl").stat().st_size > 0
    assert list((tmp_path / "workspaces").iterdir()) == [], "the workspace goes with the container"

    # the next one has its inputs from the store alone, and its attempts are numbered on
    (run.root / "dvc.lock").write_text(reply.lock)
    shutil.rmtree(tmp_path / "cache")
    again = ask("sft", "sft-1")
    assert (again.kind, again.attempt) == ("done", 1), again
    assert not (tmp_path / "store" / "checkpoints" / "sft").exists() or not list(
        (tmp_path / "store" / "checkpoints" / "sft").rglob("*.json")
    )
    assert set(yaml.safe_load(again.lock)["stages"]) == {"data", "sft"}


def test_a_mistake_of_the_user_is_the_stages_own_line(run: Run, ask: Ask) -> None:
    reply = ask("sft", "sft-1")
    assert reply.kind == "bad_input"
    assert "\n" not in reply.message
    assert "data/" in reply.message


def test_a_container_that_cannot_use_the_store_says_so_as_the_state_of_its_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = _state(work(f"{tmp_path}/not-mounted", StopRequest()))
    assert elsewhere.is_failed()
    assert (
        elsewhere.message == f"{tmp_path}/not-mounted/{REQUEST} does not exist: the pipeline and this container do "
        "not see the same store."
    )
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_SECRET_ACCESS_KEY": "hidden",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    away = _state(work("s3://store/dvc/exchange/run-1/sft-1", StopRequest()))
    assert away.is_failed()
    assert (away.message or "").startswith("s3://store/dvc/exchange/run-1/sft-1 cannot be reached")
    assert "hidden" not in (away.message or "")


def test_another_code_is_refused_before_anything_is_done(run: Run, ask: Ask) -> None:
    reply = ask("data", "data-1", code="0123456789ab")
    assert reply.kind == "bad_input"
    assert f"has the code {code_digest()}, the pipeline has 0123456789ab" in reply.message
    assert attempts(run, "data") == []


def test_a_check_says_what_is_there_and_what_is_missing(
    run: Run, ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert ask(None, "check-1").kind == "ready"
    monkeypatch.setattr(worker, "_gpus", lambda: 0)
    without = ask(None, "check-2", gpus=True, device="a100-80")
    assert (without.kind, "no GPU is in its container" in without.message) == ("bad_input", True)
    free = shutil.disk_usage
    for folder in ("workspaces", "cache"):
        with monkeypatch.context() as patch:
            patch.setattr(
                shutil,
                "disk_usage",
                lambda path, full=folder: free(path)._replace(free=2**30) if path.name == full else free(path),
            )
            patch.setattr(worker, "LOWEST_FREE_BYTES", 2**30 + 1)
            short = ask(None, f"check-{folder}")
        assert (short.kind, f"1.0 GiB are free at {tmp_path / folder} in work pool pool" in short.message) == (
            "bad_input",
            True,
        )
    mounted = ask(None, "check-5", volumes={"data.source.path": str(tmp_path)})
    assert mounted.kind == "ready"
    absent = ask(None, "check-6", volumes={"model.path": "/volume/base"})
    assert (absent.kind, "model.path=/volume/base is not in the container of work pool pool" in absent.message) == (
        "bad_input",
        True,
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file" / "cache"))
    closed = ask(None, "check-4")
    assert (closed.kind, "cache cannot be written in the container of work pool pool" in closed.message) == (
        "bad_input",
        True,
    )


def fill(source: str, target: str) -> None:
    with Path("/dev/full").open("w", buffering=1) as file:
        file.write("no byte fits\n")


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_volume_that_fills_up_is_no_crash_to_be_tried_again(
    run: Run, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    def lay_out(root: Path, remote: dict[str, str]) -> None:
        if by == "file":
            fill("", "")
        shutil.copytree(run.root / "runs", tmp_path / "copy", copy_function=fill)

    monkeypatch.setattr(worker, "lay_out", lay_out)
    reply = ask("data", "data-1")
    assert reply == Reply(
        "bad_input", f"the volume of {worker.workspaces()} in work pool pool is full. Free some space on it."
    )


def test_a_stage_whose_store_goes_away_when_it_is_done_is_not_lost(
    run: Run, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    exchange = Exchange(f"{s3}/exchange/{run.run_id}/data-1")
    exchange.write(REQUEST, dump(request_of(run, "data", "pool", "data-1", {"name": "store", "url": s3})))
    cleared: list[bool] = []

    def run_stage(*arguments: Any) -> Outcome:
        outcome = run_stage_itself(*arguments)
        # it was there until now
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").list_buckets()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        threading.Timer(8, lambda: monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")).start()
        return outcome

    def remove(mirror: CheckpointStore) -> None:
        cleared.append(exchange.read(REPLY) is not None)
        raise TransientFault("the store is away again")

    run_stage_itself = worker.run_stage
    monkeypatch.setattr(worker, "run_stage", run_stage)
    monkeypatch.setattr(CheckpointStore, "remove", remove)
    reply = work(exchange.url, StopRequest())
    assert (reply.kind, reply.attempt) == ("done", 1), reply
    assert Reply.of(exchange.read(REPLY) or b"") == reply
    assert cleared == [True], "checkpoints go after the reply is in the store"
    outs = {out["path"]: out["md5"] for out in yaml.safe_load(reply.lock)["stages"]["data"]["outs"]}
    digest = outs["data/prepared"]
    assert Exchange(s3).read(f"files/md5/{digest[:2]}/{digest[2:]}") is not None


@pytest.mark.parametrize(
    ("met", "asked", "kind"),
    [
        (TransientFault("the store is away."), 1, "stopped"),
        (UnknownFault("what is this."), 0, "crashed"),
        (EnvironmentFault("no bucket."), 0, "bad_input"),
    ],
)
def test_outputs_that_could_not_be_sent_are_no_mistake_of_the_user_unless_they_are_one(
    run: Run, ask: Ask, monkeypatch: pytest.MonkeyPatch, met: EnvironmentFault, asked: int, kind: str
) -> None:
    def send_outputs(root: Path, stage: str) -> None:
        raise met

    def run_stage(run: Run, stage: str, stop: StopRequest, observe: object) -> Outcome:
        stop.requests = asked
        return Outcome(cached=False, attempt=1)

    monkeypatch.setattr(worker, "send_outputs", send_outputs)
    monkeypatch.setattr(worker, "run_stage", run_stage)
    reply = ask("data", "data-1")
    assert (reply.kind, reply.message) == (
        kind,
        f"data is done, but its outputs could not be sent: {met} It resumes from its last checkpoint.",
    )


def test_the_digest_of_the_code_changes_with_the_code(tmp_path: Path) -> None:
    for name in ("tasks", "training"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("1\n")
    for name in ("dvc.yaml", "constraints.txt"):
        (tmp_path / name).write_text("")
    before = code_digest(tmp_path)
    (tmp_path / "tasks" / "notes.txt").write_text("no code")
    assert code_digest(tmp_path) == before
    (tmp_path / "training" / "x.py").write_text("2\n")
    assert code_digest(tmp_path) != before


@pytest.mark.parametrize("identity", ["../precious", "", "."])
def test_a_request_removes_nothing_outside_of_its_own_folder(ask: Ask, tmp_path: Path, identity: str) -> None:
    for folder in (tmp_path / "precious", tmp_path / "workspaces"):
        folder.mkdir()
        (folder / "file").write_text("kept")
    reply = ask("sft", "sft-1", id=identity)
    assert (reply.kind, "cannot name a folder" in reply.message) == ("bad_input", True)
    assert [path.read_text() for path in tmp_path.glob("*/file")] == ["kept", "kept"]
