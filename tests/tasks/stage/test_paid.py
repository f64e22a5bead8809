import os
import time
from pathlib import Path
from typing import Any

import pytest

from config import jsonl
from config.alive import now
from config.records import AttemptRow, UsageRow
from costs.ledger.attempts import Attempt, read_attempts
from tasks.stage.paid import Lifetime, charge, charge_killed

COMMON: dict[str, Any] = {"run_id": "r", "step": 3, "device": "cpu", "world_size": 2}


def event(root: Path, attempt: int, kind: str, code: int | None = None) -> None:
    row = AttemptRow.model_validate(
        {"time": time.time(), "attempt": attempt, "event": kind, "fingerprint": "f", "pid": 1}
        | {"exit_code": code, **COMMON}
    )
    jsonl.append(root / "runs/sft/attempts.jsonl", row)


def used(root: Path, attempt: int, seconds: float) -> None:
    work = {"tokens": 5, "sequences": 1, "peak_bytes": 7, "phase": "train"}
    row = UsageRow(time=time.time(), attempt=attempt, seconds=seconds, **COMMON, **work)
    jsonl.append(root / "runs/sft/usage.jsonl", row)


def seconds(attempt: Attempt) -> float:
    return sum(row.seconds for row in attempt.usage)


def read(root: Path) -> list[Attempt]:
    return read_attempts(root / "runs/sft")[0]


def test_a_process_killed_before_its_first_row_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    event(tmp_path, 1, "start")
    event(tmp_path, 1, "end", 1)
    charge(tmp_path, "sft", "r", 7, 1, 12.5, time.time())
    attempt = read(tmp_path)[-1]
    assert (attempt.number, attempt.run_id, attempt.state) == (2, "r", "unfinished")
    assert seconds(attempt) == pytest.approx(12.5)


def test_a_process_killed_between_two_rows_is_charged_up_to_its_death(tmp_path: Path) -> None:
    event(tmp_path, 1, "start")
    used(tmp_path, 1, 4.0)
    charge(tmp_path, "sft", "r", 7, 0, 9.0, time.time())
    (attempt,) = read(tmp_path)
    assert seconds(attempt) == pytest.approx(9.0)
    assert (attempt.fingerprint, attempt.world_size) == ("f", 2)


def test_the_time_that_a_process_takes_to_end_is_charged(tmp_path: Path) -> None:
    """It lets go of its memory and its device; rows of attempts before it are not its own."""
    used(tmp_path, 1, 9.0)
    event(tmp_path, 1, "end", 0)
    used(tmp_path, 2, 0.2)
    event(tmp_path, 2, "end", 0)
    charge(tmp_path, "sft", "r", 7, 1, 0.5, time.time())
    first, second = read(tmp_path)
    assert (seconds(first), seconds(second)) == (pytest.approx(9.0), pytest.approx(0.5))
    assert (second.usage[-1].phase, second.usage[-1].world_size) == ("other", 2)


def test_a_process_that_restarts_its_stage_is_charged_once(tmp_path: Path) -> None:
    """A launcher whose processes ran out of memory: two attempts, one process."""
    event(tmp_path, 1, "start")
    used(tmp_path, 1, 4.0)
    event(tmp_path, 1, "end", 1)
    event(tmp_path, 2, "start")
    used(tmp_path, 2, 5.0)
    charge(tmp_path, "sft", "r", 7, 0, 12.0, time.time())
    assert sum(map(seconds, read(tmp_path))) == pytest.approx(12.0)


def test_what_was_killed_together_with_its_run_is_charged_once_by_the_next(tmp_path: Path) -> None:
    lifetime = Lifetime(tmp_path, "sft", "r")
    lifetime.began -= 6.0
    lifetime.look(7)
    charge_killed(tmp_path)
    charge_killed(tmp_path)
    (attempt,) = read(tmp_path)
    assert seconds(attempt) == pytest.approx(6.0, abs=1.0)
    assert attempt.last == pytest.approx(time.time(), abs=5.0)
    assert not lifetime.path.exists()


def test_the_last_sign_of_life_is_kept_by_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    lifetime = Lifetime(tmp_path, "sft", "r")
    lifetime.look(7)
    assert lifetime.path.stat().st_mtime == pytest.approx(now(), abs=5.0)
    os.utime(lifetime.path, (now(), lifetime.began + 2.0))
    charge_killed(tmp_path)
    assert seconds(read(tmp_path)[0]) == pytest.approx(2.0, abs=0.01)


def test_a_process_does_not_take_over_the_record_of_one_before(tmp_path: Path) -> None:
    """Whose end could not be charged, on a full disk."""
    before = Lifetime(tmp_path, "sft", "r")
    before.look(7)
    os.utime(before.path, (now(), before.began + 5.0))
    Lifetime(tmp_path, "sft", "r").look(8)
    charge_killed(tmp_path)
    first, second = read(tmp_path)
    assert seconds(first) == pytest.approx(5.0, abs=0.01)
    assert seconds(second) == pytest.approx(0.0, abs=0.5)


def test_a_process_that_has_ended_leaves_nothing_for_the_next_run(tmp_path: Path) -> None:
    lifetime = Lifetime(tmp_path, "sft", "r")
    lifetime.look(7)
    lifetime.end(7, 3.0)
    charge_killed(tmp_path)
    assert [seconds(attempt) for attempt in read(tmp_path)] == [pytest.approx(3.0)]
