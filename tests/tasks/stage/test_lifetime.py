import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from config import jsonl
from config.alive import created, now
from config.load import load
from config.records import AttemptRow, UsageRow
from costs.ledger.attempts import read_attempts
from tasks.run.run import Run
from tasks.stage import lifetime
from tasks.stage.lifetime import Lifetime, note_killed, process_path
from tests.conftest import ROOT

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "r", load(ROOT / "recipes" / "demo.yaml"))


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[bytes]"]:
    """As DVC with the stage that it has started; ends when its standard input does."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as process:
        yield process


def watched(run: Run, parent: "subprocess.Popen[bytes]", until: float) -> Lifetime:
    seen = Lifetime(run, "sft")
    deadline = time.monotonic() + 30.0
    while seen.life is None or seen.life.seconds < until:
        assert time.monotonic() < deadline
        seen.look(parent.pid, None)
        time.sleep(0.02)
    return seen


def rows(run: Run) -> list[AttemptRow]:
    return jsonl.read(run.root / "runs" / "sft" / "attempts.jsonl", AttemptRow).rows


def test_a_process_that_was_killed_before_its_first_row_is_paid_for(
    run: Run, parent: "subprocess.Popen[bytes]"
) -> None:
    seen = watched(run, parent, 0.5)
    assert seen.life is not None
    assert seen.life.pid != parent.pid
    assert 0.5 <= seen.life.seconds <= now() - created(seen.life.pid)
    seen.end(None)
    ((attempt,), _) = read_attempts(run.root / "runs" / "sft")
    assert (attempt.number, attempt.run_id, attempt.state) == (1, "r", "unfinished")
    assert sum(row.seconds for row in attempt.usage) == pytest.approx(seen.life.seconds)


def test_what_was_killed_with_its_pipeline_is_paid_for_by_the_next_one(
    run: Run, parent: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "KEPT_EVERY_SECONDS", 0.0)
    seen = watched(run, parent, 0.5)
    assert seen.life is not None
    note_killed(run.root)
    note_killed(run.root)
    (row,) = rows(run)
    assert (row.event, row.lived_seconds) == ("lost", pytest.approx(seen.life.seconds))
    assert not process_path(run.root, "sft").exists()


def test_a_process_that_is_found_dead_is_paid_for_until_the_look_before(run: Run) -> None:
    """Its parent, held up, sees its first row and its end at once."""
    seen = Lifetime(run, "sft")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.5)
        seen.look(process.pid, None)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        start = AttemptRow(
            run_id="r",
            time=time.time(),
            attempt=1,
            event="start",
            fingerprint="",
            pid=process.pid,
            step=0,
        )
        time.sleep(0.3)
        seen.look(process.pid, start)
        assert seen.life is not None
        assert 0.4 <= seen.life.seconds <= now() - created(process.pid) - 0.3


def test_a_process_that_said_that_it_ended_is_not_lost(
    run: Run, parent: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipeline was killed, and it went on."""
    monkeypatch.setattr(lifetime, "KEPT_EVERY_SECONDS", 0.0)
    seen = watched(run, parent, 0.1)
    assert seen.life is not None
    end = AttemptRow(
        run_id="r",
        time=time.time(),
        attempt=1,
        event="end",
        fingerprint="",
        pid=seen.life.pid,
        step=3,
        exit_code=75,
    )
    jsonl.append(run.root / "runs" / "sft" / "attempts.jsonl", end)
    note_killed(run.root)
    assert [row.event for row in rows(run)] == ["end"]
    assert not process_path(run.root, "sft").exists()


@pytest.mark.parametrize("killed", ["before its first row", "after it", "after a retry"])
def test_the_attempt_of_a_process_below_a_shell_is_the_one_that_was_lost(
    run: Run, parent: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Not one more. The shell was seen, and the stage below it not yet."""
    monkeypatch.setattr(lifetime, "KEPT_EVERY_SECONDS", 0.0)
    path = run.root / "runs" / "sft" / "attempts.jsonl"

    def row(attempt: int, event: Literal["start", "end"]) -> AttemptRow:
        return AttemptRow(
            run_id="r",
            time=time.time(),
            attempt=attempt,
            event=event,
            fingerprint="",
            pid=parent.pid,
            step=0,
            exit_code=1 if event == "end" else None,
        )

    if killed == "after a retry":
        jsonl.append(path, row(1, "start"))
        jsonl.append(path, row(1, "end"))
    watched(run, parent, 0.1)
    if killed == "after it":
        jsonl.append(path, row(1, "start"))
    note_killed(run.root)
    lost = [(row.attempt, row.event) for row in rows(run)][-1]
    assert lost == (2 if killed == "after a retry" else 1, "lost")


def test_a_stage_that_several_times_starts_anew_below_one_process_is_not_paid_for_twice(
    run: Run, parent: "subprocess.Popen[bytes]"
) -> None:
    seen = watched(run, parent, 1.2)
    assert seen.life is not None
    for attempt in (1, 2):
        start = AttemptRow(
            run_id="r",
            time=time.time(),
            attempt=attempt,
            event="start",
            fingerprint="",
            pid=seen.life.pid,
            step=0,
        )
        seen.look(parent.pid, start)
    assert seen.life.seconds < 0.2
    time.sleep(0.3)
    seen.look(parent.pid, start)
    assert 0.3 <= seen.life.seconds < now() - created(seen.life.pid) - 0.2
    seen.end(start)
    assert rows(run)[-1].lived_seconds == pytest.approx(seen.life.seconds)


def test_what_a_process_lives_on_after_its_last_row_is_paid_for(
    run: Run, parent: "subprocess.Popen[bytes]"
) -> None:
    """It lets go of its memory and its device; other attempts' rows are not its own."""
    seen = Lifetime(run, "sft")
    folder = run.root / "runs" / "sft"
    deadline = time.monotonic() + 30.0
    while seen.life is None:
        assert time.monotonic() < deadline
        seen.look(parent.pid, None)
    common = {"time": time.time(), "run_id": "r", "step": 3, "device": "cpu", "world_size": 2}
    for attempt, seconds in ((1, 9.0), (2, 0.2)):
        work = {"tokens": 5, "sequences": 1, "peak_bytes": 7}
        usage = UsageRow(attempt=attempt, phase="train", seconds=seconds, **common, **work)
        jsonl.append(folder / "usage.jsonl", usage)
    end = AttemptRow(
        attempt=2, event="end", fingerprint="", pid=seen.life.pid, exit_code=0, **common
    )
    jsonl.append(folder / "attempts.jsonl", end)
    while seen.life.seconds < 0.5:
        assert time.monotonic() < deadline
        seen.look(parent.pid, end)
    seen.end(end)
    attempt = next(attempt for attempt in read_attempts(folder)[0] if attempt.number == 2)
    assert attempt.done
    assert sum(row.seconds for row in attempt.usage) == pytest.approx(seen.life.seconds)
    beyond = attempt.usage[-1]
    assert (beyond.phase, beyond.step, beyond.world_size, beyond.tokens) == ("other", 3, 2, 0)
    assert not process_path(run.root, "sft").exists()
