"""Real processes that are stopped, killed and exchanged for one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.training.distributed.test_collectives import largest_difference
from tests.training.support.processes import attempts, signalled, start
from tests.training.support.tiny import ROOT, files, work
from training.process import launch
from training.process.launch import exit_code, main, supervise
from training.process.run import LOST_PEER

pytestmark = pytest.mark.usefixtures("forks")

SUPPORT = "tests.training.support"
Project = Callable[..., Path]


@pytest.mark.parametrize(
    ("codes", "whole"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([2, 1], 2),
        ([1, 2], 2),
        ([75, 1], 1),
        ([-9, 1], 1),
        ([0, -9], 1),
        ([-15], 1),
        ([4, 0], 1),
        ([3, 3], 3),
        ([3, -9], 3),
        ([2, 3], 2),
        ([1, 77], 77),
        ([-9, 77], 77),
        ([77, 2], 2),
    ],
)
def test_the_exit_code_says_what_the_first_cause_was(codes: list[int], whole: int) -> None:
    assert exit_code(codes) == whole


def rank(number: int) -> Callable[[int], int]:
    """Finds the process with this rank below the parent."""

    def pick(parent: int) -> int:
        return next(child.pid for child in psutil.Process(parent).children() if child.environ()["RANK"] == str(number))

    return pick


@pytest.mark.integration
def test_a_stop_reaches_all_and_one_process_goes_on_where_two_stopped(project: Project, finished: Path) -> None:
    root = project("ppo", ppo={"checkpoint_every_updates": 100})
    assert signalled(root, "ppo", 2, signal.SIGTERM, processes=2) == 75
    stopped = attempts(root, "ppo")[-1]
    assert (stopped.event, stopped.exit_code, stopped.world_size) == ("end", 75, 2)
    work(root, "ppo")
    assert [row.step for row in attempts(root, "ppo") if row.event == "resume"] == [stopped.step]
    assert largest_difference(root / "models/ppo", finished / "models/ppo") < 2e-6


@pytest.mark.slow
@pytest.mark.integration
def test_where_one_process_is_killed_all_end_as_a_crash_and_the_run_goes_on(project: Project, finished: Path) -> None:
    root = project("ppo", ppo={"checkpoint_every_updates": 1}, where={"ppo": {"sharding": "zero3"}})
    assert signalled(root, "ppo", 2, signal.SIGKILL, processes=2, pick=rank(1)) == 1
    end = attempts(root, "ppo")[-1]
    assert (end.event, end.exit_code, end.message) == ("end", 1, LOST_PEER)
    work(root, "ppo")
    assert next(row.step for row in attempts(root, "ppo") if row.event == "resume") >= 1
    assert largest_difference(root / "models/ppo", finished / "models/ppo") < 2e-6


@pytest.mark.slow
@pytest.mark.integration
def test_a_request_to_any_process_stops_all_and_so_does_the_loss_of_their_parent(project: Project) -> None:
    root = project("ppo", ppo={"updates": 200})
    assert signalled(root, "ppo", 1, signal.SIGTERM, processes=2, pick=rank(1)) == 75
    began = attempts(root, "ppo")[0]
    children: list[psutil.Process] = []

    def parent(pid: int) -> int:
        children.extend(psutil.Process(pid).children())
        return pid

    assert (
        signalled(root, "ppo", attempts(root, "ppo")[-1].step + 1, signal.SIGKILL, processes=2, pick=parent)
        == -signal.SIGKILL
    )
    _, alive = psutil.wait_procs(children, timeout=60)
    assert len(children) == 2
    assert not alive
    end = attempts(root, "ppo")[-1]
    assert (end.event, end.exit_code) == ("end", 75)
    assert end.pid != began.pid


@pytest.mark.slow
@pytest.mark.integration
def test_bad_input_is_said_once_and_passed_on(project: Project) -> None:
    root = project("ppo")
    (root / "models/sft/model.safetensors").unlink()
    process = start(root, "ppo", processes=2)
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert "ppo: models/sft has no weights: a *.safetensors file is needed." in said.splitlines()
    assert said.count("has no weights") == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "at_step",
    [pytest.param(None, id="before they meet"), pytest.param(1, id="while they work", marks=pytest.mark.slow)],
)
def test_what_only_another_process_finds_is_said_at_once_and_ends_all(project: Project, at_step: int | None) -> None:
    """Its first process works on, or waits for the other, and has nothing to say."""
    root = project("ppo", ppo={"updates": 200})
    environment = {"FAIL_IN_RANK": "1", "FAIL_AT_STEP": str(at_step or 0)}
    process = start(root, "ppo", processes=2, module=f"{SUPPORT}.failing", **environment)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            if "only here" in line:
                heard = time.monotonic()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 2
    assert lines.count("ppo: the disk of this process is full, and only here.") == 1
    assert time.monotonic() - heard < 29, "the others would end by themselves after 30 seconds"
    assert not any("Traceback" in line for line in lines)
    if at_step:
        end = attempts(root, "ppo")[-1]
        assert (end.event, end.exit_code, end.message) == (
            "end",
            1,
            "the disk of this process is full, and only here.",
        )
        assert end.step < 200, "the first one did not go on to its last update"


@pytest.mark.parametrize(
    ("visible", "processes", "given"),
    [
        (None, 1, ["0"]),
        (None, 4, ["0", "1", "2", "3"]),
        ("2,3", 1, ["2"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("1,-1,0", 1, ["1"]),
        ("", 1, [None]),
        (None, 5, [None] * 5),
        ("3", 2, [None] * 2),
    ],
)
def test_each_process_sees_its_own_gpu_alone(
    visible: str | None, processes: int, given: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with four; too few are left as they are, for the stage to refuse."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    show = [sys.executable, "-c", SHOW, str(tmp_path)]
    with launch.started(show, processes, tmp_path, []) as running:
        for process in running:
            assert process.wait(timeout=60) == 0
    seen = [(tmp_path / f"seen-{rank}").read_text().split("|") for rank in range(processes)]
    restricted = given[0] is not None
    assert [devices for devices, _ in seen] == [device if device is not None else str(visible) for device in given]
    assert [local for _, local in seen] == ["0" if restricted else str(rank) for rank in range(processes)]


SHOW = (
    "import os, sys; e = os.environ; "
    "open(f'{sys.argv[1]}/seen-{e[\"RANK\"]}', "
    "'w').write(f'{e.get(\"CUDA_VISIBLE_DEVICES\")}|{e[\"LOCAL_RANK\"]}')"
)


def test_a_stage_that_is_one_process_sees_one_gpu(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project("sft"))
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    monkeypatch.setattr(launch, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    became: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: became.append(environment))
    monkeypatch.setattr(launch, "supervise", lambda *_: 0)
    main(["sft", "--processes", "1"])
    assert [(environment["CUDA_VISIBLE_DEVICES"], "LOCAL_RANK" in environment) for environment in became] == [
        ("0", False)
    ]


def test_a_number_of_processes_below_one_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project("ppo"))
    assert main(["ppo", "--processes", "0"]) == 2
    assert capsys.readouterr().err == "ppo: --processes=0 must be at least 1.\n"


def test_one_process_becomes_the_stage_itself(project: Project) -> None:
    root = project("ppo", ppo={"updates": 1})
    process = start(root, "ppo", processes=1, TESTS_STAGE_SERVER="")  # no fork
    try:
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert {row.pid for row in attempts(root, "ppo")} == {process.pid}


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("stage", "level", "most_tokens", "name", "changes"),
    [
        (
            "ppo",
            "zero3",
            70,
            "ppo.micro_batch_tokens",
            {"micro_batch_tokens": 100, "num_mini_batches": 1, "updates": 2},
        ),
        ("sft", "zero2", 130, "sft.micro_batch_size", {"max_steps": 3}),
    ],
)
def test_where_one_process_runs_out_of_memory_in_the_middle_of_a_step_all_go_on_in_smaller_pieces(
    stage: str,
    level: str,
    most_tokens: int,
    name: str,
    changes: dict,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ample = project(stage, "ample", **{stage: changes})
    work(ample, stage)
    root = project(stage, where={stage: {"sharding": level}}, **{stage: changes})
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", f"{SUPPORT}.short_of_memory", stage, str(most_tokens)]
    assert supervise(stage, command, 2) == 0
    rows = attempts(root, stage)
    again = [row for row in rows if row.event == "retry"]
    assert again
    assert all(row.message.startswith(f"after an attempt out of memory: {name} ") for row in again)
    assert [row.exit_code for row in rows if row.event == "end"] == [1] * len(again) + [0]
    assert {row.world_size for row in rows} == {2}
    assert largest_difference(root / "models" / stage, ample / "models" / stage) < 2e-6
    assert not list((root / "checkpoints" / stage).glob("*/pieces.json"))


@pytest.mark.slow
@pytest.mark.integration
def test_what_does_not_fit_in_the_smallest_pieces_ends_all_with_one_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = project("sft", sft={"micro_batch_size": 2, "max_steps": 2}, where={"sft": {"sharding": "zero3"}})
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert supervise("sft", [sys.executable, "-m", f"{SUPPORT}.short_of_memory", "sft", "1"], 2) == 2
    assert not (root / "models/sft").exists()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("level", ["none", "zero3"])
def test_where_the_disk_fills_up_under_the_model_all_end_with_one_line_and_go_on_with_room(
    level: str, project: Project, finished: Path
) -> None:
    """The disk of models/ alone: what else a stage writes has room."""
    root = project("ppo", where={"ppo": {"sharding": level}})
    models = root / "models"
    (models / "ppo").mkdir()
    (models / "ppo" / "previous").write_text("previous")
    kibibytes = 200 + sum(map(len, files(models).values())) // 1024
    stage = f"{sys.executable} -m training.process.launch ppo --processes 2"
    script = f"""
        cp -r models kept && mount -t tmpfs -o size={kibibytes}k tmpfs models || exit 77
        cp -r kept/. models
        {stage} 2> said; echo $? > code
        ls models models/ppo > left
        mount -o remount,size=1g models
        {stage} && cp -r models/ppo made
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not (root / "code").exists():
        pytest.skip("this user may not mount a file system, so none can be filled")
    said = (root / "said").read_text()
    assert (root / "code").read_text() == "2\n", said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "ppo: " in line]
    assert "no space left on the disk" in line
    assert (root / "left").read_text().split() == [*("models:", "ppo", "reward", "sft"), *("models/ppo:", "previous")]
    assert done.returncode == 0, done.stderr
    rows = attempts(root, "ppo")
    assert [row.exit_code for row in rows if row.event == "end"] == [2, 0]
    assert [row.step for row in rows if row.event == "resume"] == [6]
    assert largest_difference(root / "origins", finished / "models/ppo") < 2e-6
