import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import jsonl
from config.alive import created, now
from config.records import UsageRow
from training.process.usage import Meter, Work

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "usage.jsonl"


def meter(path: Path | None) -> Meter:
    return Meter(path, "run-1", attempt=2, device="cpu", world_size=1)


def rows(path: Path) -> list[UsageRow]:
    return jsonl.read(path, UsageRow).rows


def test_a_phase_is_a_row_with_its_time_and_work(path: Path) -> None:
    measured = meter(path)
    with measured.phase("rollout", 3) as work:
        work.add(tokens=10, sequences=2)
        work.add(tokens=5)
        time.sleep(0.05)
    row = rows(path)[-1]
    assert (row.run_id, row.attempt, row.step, row.phase, row.tokens, row.sequences) == (
        "run-1",
        2,
        3,
        "rollout",
        15,
        2,
    )
    assert 0.05 <= row.seconds < 0.5


def test_the_rows_add_up_to_the_life_of_the_process(path: Path) -> None:
    measured = meter(path)
    for step in (1, 2):
        time.sleep(0.02)
        with measured.phase("work", step):
            time.sleep(0.02)
    time.sleep(0.03)
    measured.close(2)
    lived = now() - created(os.getpid())
    assert sum(row.seconds for row in rows(path)) == pytest.approx(lived, abs=0.05)
    assert [row.phase for row in rows(path)] == ["start", "work", "work", "other"]
    assert rows(path)[-1].seconds >= 0.05


def test_laps_account_all_time_since_the_last_row(path: Path) -> None:
    measured = meter(path)
    for step in (1, 2, 3):
        time.sleep(0.03)
        measured.lap("train", step, Work(tokens=7, sequences=1))
    measured.close(3)
    assert [row.phase for row in rows(path)] == ["start", "train", "train", "other"]
    assert all(0.03 <= row.seconds < 0.5 for row in rows(path)[1:3])
    assert sum(row.tokens for row in rows(path)) == 21
    assert rows(path)[-1].seconds < 0.03


def test_a_phase_that_fails_was_paid_for_too(path: Path) -> None:
    measured = meter(path)

    def fail() -> None:
        with measured.phase("update", 1) as work:
            work.add(tokens=3)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert (rows(path)[-1].phase, rows(path)[-1].tokens) == ("update", 3)


def test_a_process_that_did_nothing_has_only_started(path: Path) -> None:
    meter(path).close(0)
    assert [row.phase for row in rows(path)] == ["start"]
    assert rows(path)[0].seconds == pytest.approx(now() - created(os.getpid()), abs=0.5)


def test_other_processes_than_the_first_write_nothing(tmp_path: Path) -> None:
    measured = meter(None)
    with measured.phase("update", 1):
        pass
    measured.close(1)
    assert list(tmp_path.iterdir()) == []


def test_times_never_go_back(path: Path) -> None:
    measured = meter(path)
    for step in range(5):
        with measured.phase("work", step):
            pass
    assert all(a.time <= b.time for a, b in itertools.pairwise(rows(path)))


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_meanwhile_costs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    measured, clock = meter(path), time.time
    lived, began = now() - created(os.getpid()), time.monotonic()
    with measured.phase("work", 1):
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        time.sleep(0.02)
    measured.lap("work", 2, Work())
    measured.close(2)
    lived += time.monotonic() - began
    assert sum(row.seconds for row in rows(path)) == pytest.approx(lived, abs=0.05)


PEAKS = """
import numpy as np
from training.process.usage import peak_memory_bytes, reset_peak_memory
reset_peak_memory(accelerator=False)
before = peak_memory_bytes(accelerator=False)
block = np.ones(8 * 2**20)
during = peak_memory_bytes(accelerator=False)
del block
reset_peak_memory(accelerator=False)
print(during - before, during - peak_memory_bytes(accelerator=False))
"""


def test_the_peak_is_that_since_the_last_reset() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot reset the peak of a process")
    # a process of its own: this one may have changed its user in another test, and then may not reset its peak
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [int(word) for word in done.stdout.split()] == pytest.approx([64 * 2**20] * 2, rel=0.1)
