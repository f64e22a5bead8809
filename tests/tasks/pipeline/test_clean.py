import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config import jsonl
from config.records import AttemptRow, PipelineRow
from config.workspace.at_work import locked
from config.workspace.champions import Champion, ChampionRecord, Event, write_record
from tasks.dvc.made import Made
from tasks.pipeline.clean import CHAMPIONS_OWN, MAY_WAIT, RUN_AT_WORK, Leftover, chosen, leftovers, remove

DAY = 24 * 3600.0
NOW = time.time()


def workspace(folder: Path, name: str, days: float, run_id: str = "", size: int = 1000) -> Path:
    """A workspace last written `days` ago; with a run if it has an id."""
    root = folder / name
    (root / "models").mkdir(parents=True)
    (root / "models" / "weights").write_bytes(b"x" * size)
    if run_id:
        jsonl.append(root / "runs" / "pipeline.jsonl", PipelineRow(time=NOW, run_id=run_id, event="start"))
    aged(root, days)
    return root


def checkpoint(root: Path, stage: str, fingerprint: str, days: float) -> Path:
    folder = root / "checkpoints" / stage / fingerprint
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001" / "state").write_bytes(b"x" * 1000)
    aged(folder, days)
    return folder


def aged(folder: Path, days: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (NOW - days * DAY, NOW - days * DAY))


def champion(root: Path, run_id: str) -> None:
    entry = Champion(run_id=run_id, method="ppo", model_digest="m", data_version="d", data_key="k")
    event = Event(time=1.0, event="promoted", champion=run_id, before=None, by="test", why="test")
    write_record(root, ChampionRecord(lineage=(entry,), events=(event,)))


def attempt(root: Path, stage: str, fingerprint: str, run_id: str, event: str, pid: int) -> None:
    row = {
        "time": NOW,
        "run_id": run_id,
        "attempt": 1,
        "event": event,
        "fingerprint": fingerprint,
        "pid": pid,
        "step": 1,
    }
    jsonl.append(root / "runs" / stage / "attempts.jsonl", AttemptRow.model_validate(row))


def names(found: list[Leftover]) -> dict[str, str]:
    return {leftover.path.name: leftover.kept_because for leftover in found}


def test_what_is_old_goes_and_what_is_young_stays(tmp_path: Path) -> None:
    root, folder = tmp_path / "project", tmp_path / "workspaces"
    old, young = workspace(folder, "old", 20, "r1"), workspace(folder, "young", 2, "r2")
    gone, fresh = checkpoint(root, "sft", "aaaa", 20), checkpoint(root, "ppo", "bbbb", 2)
    judged = chosen(leftovers(root, folder), 14 * DAY, None)
    assert {leftover.path for leftover in judged if leftover.goes} == {gone, old}
    assert all(remove(leftover) for leftover in judged if leftover.goes)
    assert [path.exists() for path in (old, gone, young, fresh)] == [False, False, True, True]


def test_above_the_size_the_oldest_go_first(tmp_path: Path) -> None:
    folder = tmp_path / "workspaces"
    for name, days in (("a", 3), ("b", 2), ("c", 1)):
        workspace(folder, name, days, f"r-{name}", size=1_000_000)
    judged = chosen(leftovers(tmp_path, folder), 14 * DAY, 2_500_000)
    assert [(leftover.path.name, leftover.goes) for leftover in judged] == [("a", True), ("b", False), ("c", False)]


def test_what_a_run_at_work_or_the_champion_has_never_goes(tmp_path: Path) -> None:
    root, folder = tmp_path / "project", tmp_path / "workspaces"
    root.mkdir()
    champion(root, "best")
    running, best, _ = (
        workspace(folder, name, 99, run) for name, run in (("running", "r1"), ("best", "best"), ("other", "r2"))
    )
    kept_workspace = workspace(folder, "own", 99, "r3")
    champion(kept_workspace, "r3")
    workspace(folder, "paused", 6)
    for fingerprint in ("alive", "dead", "best"):
        checkpoint(root, "sft", fingerprint, 99)
    attempt(root, "sft", "best", "best", "end", 1)
    attempt(root, "sft", "alive", "manual", "start", os.getpid())
    aged(kept_workspace, 99)
    with locked(running):
        result = leftovers(root, folder)
        assert names(result) == {
            "best": CHAMPIONS_OWN,
            "other": "",
            "own": CHAMPIONS_OWN,
            "paused": MAY_WAIT,
            "running": RUN_AT_WORK,
            "alive": f"sft is running (process {os.getpid()})",
            "dead": "",
        }
        assert {leftover.path.name for leftover in chosen(result, 0.0, 0) if leftover.goes} == {"other", "dead"}
    with locked(root):
        assert {leftover.kept_because for leftover in leftovers(root, tmp_path / "nowhere")} == {RUN_AT_WORK}
    assert best.exists()


def test_a_study_goes_unless_it_is_at_work(tmp_path: Path) -> None:
    study = tmp_path / ".rlhf/studies/mine"
    (study / "models").mkdir(parents=True)
    (study / "models/weights").write_bytes(b"x" * 1000)
    (study / "data").symlink_to(tmp_path)  # leads elsewhere, and is not counted
    aged(study, 20)
    (leftover,) = leftovers(tmp_path, tmp_path / "workspaces", NOW)
    assert (leftover.kind, leftover.path, leftover.kept_because) == ("study", study, "")
    assert 1000 <= leftover.size_bytes < 20_000
    with locked(study):
        (held,) = leftovers(tmp_path, tmp_path / "workspaces", NOW)
    assert held.kept_because == RUN_AT_WORK
    assert remove(leftover)
    assert not study.exists()


def test_a_run_that_began_since_keeps_its_workspace(tmp_path: Path) -> None:
    result = workspace(tmp_path / "workspaces", "a", 99, "r1")
    (first,) = chosen(leftovers(tmp_path, tmp_path / "workspaces"), 0.0, None)
    with locked(result):
        assert not remove(first)
    assert (result / "models" / "weights").exists()


def test_the_command_shows_first_and_removes_when_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = tmp_path / "project", tmp_path / "workspaces"
    workspace(folder, "old", 20, "r1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "link").symlink_to(elsewhere)
    root.mkdir()
    (root / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(root)
    monkeypatch.setenv("RLHF_WORKSPACES", str(folder))

    def rlhf(*options: str) -> dict:
        said = CliRunner().invoke(app, ["clean", "--json", *options], catch_exceptions=False)
        return dict(json.loads(said.stdout))

    shown = rlhf()
    assert (shown["dry_run"], shown["removed_bytes"], [item["goes"] for item in shown["items"]]) == (True, 0, [True])
    assert (folder / "old").exists()
    done = rlhf("--yes")
    assert done["removed_bytes"] == shown["going_bytes"] > 1000
    assert not (folder / "old").exists()
    assert elsewhere.exists()
    assert rlhf("--older-than", "0")["items"] == []


def made(root: Path, run_id: str, days: float, *contents: str) -> list[Path]:
    """A record of a run whose stage put out these contents, and their files in DVC's cache."""
    cache, outs, files = root / ".dvc" / "cache", [], []
    for content in contents:
        digest = hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()
        files.append(cache / "files" / "md5" / digest[:2] / digest[2:])
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text(content)
        outs.append({"path": f"models/{content}", "md5": digest})
    record = cache / "made" / run_id / "sft.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(Made(run_id, 1, 1.0, 1.0, {"outs": outs})._asdict()))
    aged(record.parent, days)
    return files


def test_outputs_go_with_the_newest_run_that_made_them_unless_something_that_stays_reaches_them(
    tmp_path: Path,
) -> None:
    champion(tmp_path, "1-champion")
    kept, shared, old, old_too, young = (
        *made(tmp_path, "1-champion", 90, "best"),
        *made(tmp_path, "2-old", 60, "best", "both", "alone")[1:],
        *made(tmp_path, "3-old", 50, "both", "locked")[1:],
        *made(tmp_path, "4-young", 1, "new"),
    )
    digest = "".join(old_too.parts[-2:])
    (tmp_path / "dvc.lock").write_text(json.dumps({"stages": {"sft": {"outs": [{"path": "a", "md5": digest}]}}}))
    judged = chosen(leftovers(tmp_path, tmp_path / "none"), 30 * DAY, None)
    goes = {leftover.path.name: leftover.goes for leftover in judged}
    assert goes == {"1-champion": False, "2-old": True, "3-old": True, "4-young": False}
    assert all(remove(leftover) for leftover in judged if leftover.goes)
    assert [path.exists() for path in (kept, shared, old, old_too, young)] == [True, False, False, True, True]
    assert {path.name for path in (tmp_path / ".dvc/cache/made").iterdir()} == {"1-champion", "4-young"}
