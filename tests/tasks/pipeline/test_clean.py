import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from config import jsonl
from config.records import AttemptRow
from config.workspace.at_work import locked
from config.workspace.champions import Champion, ChampionRecord, Event, write_record
from tasks.dvc.origins import Origin
from tasks.pipeline.clean import CHAMPIONS_OWN, RUN_AT_WORK, Leftover, chosen, leftovers, remove

DAY = 24 * 3600.0
NOW = time.time()


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
    gone, young = checkpoint(tmp_path, "sft", "aaaa", 20), checkpoint(tmp_path, "ppo", "bbbb", 2)
    judged = chosen(leftovers(tmp_path), 14 * DAY, None)
    assert {leftover.path for leftover in judged if leftover.goes} == {gone}
    assert all(remove(leftover) for leftover in judged if leftover.goes)
    assert [path.exists() for path in (gone, young)] == [False, True]


def test_above_the_size_the_oldest_go_first(tmp_path: Path) -> None:
    for name, days in (("a", 3), ("b", 2), ("c", 1)):
        checkpoint(tmp_path, "sft", name, days)
    size = leftovers(tmp_path)[0].size_bytes
    judged = chosen(leftovers(tmp_path), 14 * DAY, int(2.5 * size))
    assert [(leftover.path.name, leftover.goes) for leftover in judged] == [("a", True), ("b", False), ("c", False)]


def test_what_a_run_at_work_or_the_champion_has_never_goes(tmp_path: Path) -> None:
    champion(tmp_path, "best")
    for fingerprint in ("alive", "dead", "best"):
        checkpoint(tmp_path, "sft", fingerprint, 99)
    attempt(tmp_path, "sft", "best", "best", "end", 1)
    attempt(tmp_path, "sft", "alive", "manual", "start", os.getpid())
    result = leftovers(tmp_path)
    assert names(result) == {"best": CHAMPIONS_OWN, "alive": f"sft is running (process {os.getpid()})", "dead": ""}
    assert {leftover.path.name for leftover in chosen(result, 0.0, 0) if leftover.goes} == {"dead"}
    with locked(tmp_path):
        assert {leftover.kept_because for leftover in leftovers(tmp_path)} == {RUN_AT_WORK}


def test_a_study_goes_unless_it_is_at_work(tmp_path: Path) -> None:
    study = tmp_path / ".rlhf/studies/mine"
    (study / "models").mkdir(parents=True)
    (study / "models/weights").write_bytes(b"x" * 1000)
    (study / "data").symlink_to(tmp_path)  # leads elsewhere, and is not counted
    aged(study, 20)
    (leftover,) = leftovers(tmp_path, NOW)
    assert (leftover.kind, leftover.path, leftover.kept_because) == ("study", study, "")
    assert 1000 <= leftover.size_bytes < 20_000
    with locked(study):
        (held,) = leftovers(tmp_path, NOW)
    assert held.kept_because == RUN_AT_WORK
    assert remove(leftover)
    assert not study.exists()


def test_a_run_that_began_since_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "sft", "a", 99)
    (first,) = chosen(leftovers(tmp_path), 0.0, None)
    with locked(tmp_path):
        assert not remove(first)
    assert folder.exists()


def test_the_command_shows_first_and_removes_when_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = checkpoint(tmp_path, "sft", "old", 20)
    (old.parent / "link").symlink_to(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)

    def rlhf(*options: str) -> dict:
        said = CliRunner().invoke(app, ["clean", "--json", *options], catch_exceptions=False)
        return dict(json.loads(said.stdout))

    shown = rlhf()
    assert (shown["dry_run"], shown["removed_bytes"], [item["goes"] for item in shown["items"]]) == (True, 0, [True])
    assert old.exists()
    done = rlhf("--yes")
    assert done["removed_bytes"] == shown["going_bytes"] > 1000
    assert not old.exists()


def made(root: Path, run_id: str, days: float, *contents: str) -> list[Path]:
    """A record of a run whose stage put out these contents, and their files in DVC's cache."""
    cache, outs, files = root / ".dvc" / "cache", [], []
    for content in contents:
        digest = hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()
        files.append(cache / "files" / "md5" / digest[:2] / digest[2:])
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text(content)
        outs.append({"path": f"models/{content}", "md5": digest})
    record = cache / "origins" / run_id / "sft.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(Origin(run_id, 1, 1.0, 1.0, {"outs": outs})._asdict()))
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
    judged = chosen(leftovers(tmp_path), 30 * DAY, None)
    goes = {leftover.path.name: leftover.goes for leftover in judged}
    assert goes == {"1-champion": False, "2-old": True, "3-old": True, "4-young": False}
    assert all(remove(leftover) for leftover in judged if leftover.goes)
    assert [path.exists() for path in (kept, shared, old, old_too, young)] == [True, False, False, True, True]
    assert {path.name for path in (tmp_path / ".dvc/cache/origins").iterdir()} == {"1-champion", "4-young"}


def test_outputs_that_a_study_uses_stay(tmp_path: Path) -> None:
    (old,) = made(tmp_path, "1-old", 90, "shared")
    study = tmp_path / ".rlhf/studies/mine"
    study.mkdir(parents=True)
    lock = {"stages": {"sft": {"outs": [{"path": "a", "md5": "".join(old.parts[-2:])}]}}}
    (study / "dvc.lock").write_text(json.dumps(lock))
    with locked(study):
        assert {leftover.kept_because for leftover in leftovers(tmp_path)} == {RUN_AT_WORK}
    assert all(remove(leftover) for leftover in leftovers(tmp_path) if leftover.kind == "outputs")
    assert old.exists()
