"""DVC's process of the next stage waits for its turn, does nothing before it, and outlives
nobody.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks.dvc.repro import ReproProcesses, log_path
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.stage.outcome import Outcome
from tasks.stage.progress import attempts
from tasks.stage.runner import _dvc_processes, run_stage

pytestmark = pytest.mark.integration
NewRun = Callable[..., Run]


def waiting(root: Path, stage: str) -> list[psutil.Process]:
    """Processes of DVC at `stage` in this folder."""
    return [process for process in _dvc_processes(root) if process.cmdline()[-1] == stage]


def bring_up(run: Run, stage: str, repro_processes: ReproProcesses) -> Outcome:
    return run_stage(run, stage, StopRequest(), lambda _: None, repro_processes)


def test_the_process_that_waited_does_the_stage_and_the_next_one_waits_meanwhile(
    project: Path, new_run: NewRun
) -> None:
    run = new_run()
    repro_processes = ReproProcesses(run, ["sft", "reward"])
    repro_processes.prepare()
    [early] = waiting(project, "sft")
    assert not attempts(project, "sft")
    taken = repro_processes.take("sft")
    assert taken.pid == early.pid
    assert taken.wait() == 0
    assert (project / "sft.out").read_text() == "one"
    assert len(attempts(project, "sft")) == 2  # start and end
    [late] = waiting(project, "reward")
    assert bring_up(run, "reward", repro_processes) == Outcome(cached=False, attempt=1)
    assert not late.is_running()
    assert not waiting(project, "sft") + waiting(project, "reward")


def test_nothing_is_done_by_a_process_that_is_sent_away(project: Path, new_run: NewRun) -> None:
    repro_processes = ReproProcesses(new_run(), ["sft"])
    repro_processes.prepare()
    assert waiting(project, "sft")
    repro_processes.close()
    assert not waiting(project, "sft")
    assert not attempts(project, "sft")
    assert not (project / "sft.out").exists()


@pytest.mark.parametrize("ahead", [["sft"], ["reward"], []])
def test_a_stage_whose_process_died_or_that_nobody_expected_is_done_all_the_same(
    project: Path, new_run: NewRun, ahead: list[str]
) -> None:
    run = new_run()
    repro_processes = ReproProcesses(run, ahead)
    repro_processes.prepare()
    for process in [each for stage in ahead for each in waiting(project, stage)]:
        process.kill()
        process.wait()
    assert bring_up(run, "sft", repro_processes) == Outcome(cached=False, attempt=1)
    repro_processes.close()
    assert not waiting(project, "sft") + waiting(project, "reward")


def test_a_process_that_waits_ends_with_the_run_that_was_killed(
    project: Path, new_run: NewRun
) -> None:
    new_run()
    code = f"""
import time
from pathlib import Path
from config.load import load
from tasks.dvc.repro import ReproProcesses
from tasks.run.run import Run
root = Path({str(project)!r})
kept = ReproProcesses(Run(root, "killed", load(root / "params.yaml")), ["sft"])
kept.prepare()
print("prepared", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"prepared\n"
        [process] = waiting(project, "sft")
        os.kill(parent.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert not attempts(project, "sft")


def test_what_it_prints_is_in_the_log_of_the_stage(project: Path, new_run: NewRun) -> None:
    bring_up(new_run(), "sft", ReproProcesses(new_run(), ["sft"]))
    assert "Running stage 'sft'" in log_path(project, "sft").read_text()
