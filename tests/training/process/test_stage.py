"""The contract of a stage process: exit codes, one line for a user's mistake, rows of the attempt, stopping."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from config import jsonl
from config.alive import created
from config.errors import ParamsError, StageStopped
from config.locks import is_held
from config.records import PIPELINE_VARIABLE, RUN_ID_VARIABLE, STAGES, UsageRow
from config.workspace.at_work import RUN_LOCK
from tests.conftest import ROOT
from tests.training.support.processes import attempts, finish, metric_rows, metrics, signalled, start
from tests.training.support.tiny import files, on_a_small_disk, open_stage, run_main
from training.process.run import entry, run_stage
from training.process.stage import Stage

pytestmark = pytest.mark.usefixtures("forks")

Project = Callable[..., Path]


def said(capsys: pytest.CaptureFixture[str], stage: str) -> str:
    """The one line on stderr that is the stage's."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{stage}: ")]
    assert len(lines) == 1
    return lines[0]


# ---------------------------------------------------------------- exit codes


def test_a_finished_stage_has_a_start_and_an_end(finished: Path) -> None:
    rows = attempts(finished, "ppo")
    assert [(row.event, row.exit_code, row.attempt) for row in rows] == [("start", None, 1), ("end", 0, 1)]
    assert rows[0].pid == os.getpid()
    assert len(rows[0].fingerprint) == 16
    assert rows[0].fingerprint == rows[1].fingerprint
    usage = jsonl.read(finished / "runs/ppo/usage.jsonl", UsageRow).rows
    assert {row.phase for row in usage} == {
        "start",
        "rollout",
        "logprobs",
        "score",
        "reference",
        "value",
        "advantage",
        "update",
        "save",
        "other",
    }


def test_bad_params_are_one_line_and_exit_2(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    root = project("ppo")
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("cliprange: 0.2", "clip_range: 0.2"))
    assert run_main(root, "ppo") == 2
    assert "cliprange" in said(capsys, "ppo")
    (root / "params.yaml").unlink()
    assert run_main(root, "ppo") == 2
    assert "params.yaml does not exist" in said(capsys, "ppo")


def test_a_stage_started_by_hand_does_not_work_beside_a_run(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PIPELINE_VARIABLE, raising=False)
    root = project("ppo")
    hold = (
        "from pathlib import Path; from config.locks import lock_file\n"
        f"with lock_file(Path({str(root / RUN_LOCK)!r})): print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert run_main(root, "ppo") == 2
        other.kill()
    assert f"process {other.pid} is already running the pipeline in" in said(capsys, "ppo")
    ppo_entry = entry("ppo")
    stage = Stage("ppo", ppo_entry.sections, ppo_entry.inputs, root)
    stage.begin()
    assert is_held(root / RUN_LOCK)
    stage.held.close()
    assert not is_held(root / RUN_LOCK)


@pytest.mark.parametrize(
    ("stage", "missing"),
    [
        ("sft", "data/prepared/sft"),
        ("reward", "metrics/data.json"),
        ("reward", "models/sft"),
        ("ppo", "models/reward"),
        ("ppo", "data/prepared/prompts/train.arrow"),
        ("evaluate", "data/tokenizer"),
    ],
)
def test_a_missing_input_is_named(
    project: Project, capsys: pytest.CaptureFixture[str], stage: str, missing: str
) -> None:
    root = project(stage)
    (root / missing).rename(root / "elsewhere")
    assert run_main(root, stage) == 2
    assert f"{missing} does not exist" in said(capsys, stage)
    assert [(row.event, row.exit_code) for row in attempts(root, stage)] == [("start", None), ("end", 2)]


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


@pytest.mark.parametrize(("stage", "model"), [("reward", "sft"), ("ppo", "sft"), ("ppo", "reward")])
@pytest.mark.parametrize(
    ("damage", "word"), [(no_weights, "no weights"), (only_bin, "pytorch_model.bin"), (truncated, "damaged weights")]
)
def test_a_damaged_model_is_named_and_nothing_is_left_half_written(
    project: Project,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    model: str,
    damage: Callable[[Path], None],
    word: str,
) -> None:
    root = project(stage)
    damage(root / "models" / model)
    before = files(root / "models")
    assert run_main(root, stage) == 2
    line = said(capsys, stage)
    assert word in line
    assert f"models/{model}" in line
    assert files(root / "models") == before
    assert not (root / "metrics" / f"{stage}.json").exists()


def test_a_crash_is_told_and_recorded(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    root = project("ppo")

    def work(stage: Stage) -> None:
        raise ZeroDivisionError("of the test")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.chdir(root), pytest.raises(ZeroDivisionError):
            run_stage("ppo", ("ppo",), (), work)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "ZeroDivisionError: of the test" in said(capsys, "ppo")
    assert (attempts(root, "ppo")[-1].exit_code, attempts(root, "ppo")[-1].message) == (
        1,
        "ZeroDivisionError: of the test",
    )


# ---------------------------------------------------------------- the place


@pytest.mark.integration
def test_a_full_disk_is_one_line_and_the_previous_model_stays(
    project: Project, tmp_path: Path, finished: Path
) -> None:
    root = project("ppo")
    (root / "models/ppo").mkdir()
    (root / "models/ppo/previous").write_text("previous")
    kept = tmp_path / "kept.txt"
    script = (
        "import pathlib, subprocess, sys\n"
        "code = subprocess.run([sys.executable, '-m', 'training.ppo']).returncode\n"
        f"pathlib.Path({str(kept)!r}).write_text(' '.join(path.name for path in "
        "pathlib.Path('models/ppo').iterdir()))\n"
        "sys.exit(code)"
    )
    size = sum(map(len, files(root).values())) // 1024
    done = on_a_small_disk(root, size + 300, [sys.executable, "-c", script])
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ppo: ")]
    assert len(lines) == 1
    assert "no space left on the disk" in lines[0]
    assert "Traceback" not in done.stderr
    assert kept.read_text() == "previous"


# ---------------------------------------------------------------- rows


def test_attempts_are_numbered_and_carry_the_run_id(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project("ppo")
    first, _ = open_stage(root, "ppo")
    monkeypatch.setenv(RUN_ID_VARIABLE, "run-7")
    second, _ = open_stage(root, "ppo")
    second.log(3, {"kl": 0.5})
    assert (first.attempt, second.attempt) == (1, 2)
    assert [row.run_id for row in attempts(root, "ppo")] == ["manual", "run-7"]
    row = metric_rows(root, "ppo")[0]
    assert (row.run_id, row.attempt, row.step, row.values) == ("run-7", 2, 3, {"kl": 0.5})


def test_the_fingerprint_is_of_the_sections_and_inputs_of_the_stage(project: Project) -> None:
    def now(name: str, stage: str = "ppo", **sections: dict) -> str:
        return open_stage(project("ppo", name, **sections), stage)[0].fingerprint

    first = now("a")
    assert now("b") == first
    assert now("c", ppo={"learning_rate": 2.0e-4}) != first
    assert now("d", prices={"usd_per_device_hour": 9.0}) == first
    assert now("e", evaluate={"prompts": 3}) == first
    root = project("ppo", "f")
    (root / "models/sft/model.safetensors").write_bytes(b"other weights")
    assert open_stage(root, "ppo")[0].fingerprint != first


def test_other_processes_than_the_first_write_no_rows(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project("ppo")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stage, _ = open_stage(root, "ppo")
    stage.log(1, {"kl": 0.5})
    stage.meter.close(1)
    assert not (root / "runs").exists()


# ---------------------------------------------------------------- stopping


def test_a_stage_stops_only_when_asked(project: Project) -> None:
    stage, _ = open_stage(project("ppo"), "ppo")
    stage.stop_if_requested()
    stage.stopper.request(signal.SIGTERM, None)
    with pytest.raises(StageStopped) as stopped:
        stage.stop_if_requested()
    assert stopped.value.exit_code == 75


@pytest.mark.integration
def test_ctrl_c_is_a_resumable_stop(project: Project, finished: Path) -> None:
    root = project("evaluate", evaluate={"prompts": 33})
    process = start(root, "evaluate")
    try:
        while not metric_rows(root, "evaluate"):
            assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75
    assert "KeyboardInterrupt" not in error
    finish(root, "evaluate")
    assert metrics(root, "evaluate")["prompts"] == 33
    assert [row.exit_code for row in attempts(root, "evaluate") if row.event == "end"] == [75, 0]


# ---------------------------------------------------------------- params.yaml is edited meanwhile


def edit(root: Path, old: str, new: str) -> None:
    text = (root / "params.yaml").read_text()
    assert old in text
    (root / "params.yaml").write_text(text.replace(old, new))


@pytest.mark.integration
def test_params_edited_meanwhile_stop_the_stage_and_it_goes_on_once_they_are_back(
    project: Project, finished: Path
) -> None:
    root = project("ppo")
    process = start(root, "ppo")
    try:
        while not metric_rows(root, "ppo"):
            assert process.poll() is None, process.communicate()[1]
        edit(root, "cliprange: 0.2", "cliprange: 0.3")
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert "ppo.cliprange 0.2 -> 0.3" in error
    assert not (root / "models/ppo").exists()
    edit(root, "cliprange: 0.3", "cliprange: 0.2")
    finish(root, "ppo")
    assert files(root / "models/ppo") == files(finished / "models/ppo")
    assert [row.event for row in attempts(root, "ppo")] == ["start", "end", "start", "resume", "end"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("stage", "content"),
    [
        *(pytest.param(stage, None, id=f"another seed-{stage}") for stage in STAGES),
        *(
            pytest.param(
                stage,
                "seed: [",
                id=f"unreadable-{stage}",
                marks=() if stage == "sft" else pytest.mark.slow,  # each asks the same function
            )
            for stage in STAGES
        ),
    ],
)
def test_no_output_is_put_in_place_once_params_are_others(project: Project, stage: str, content: str | None) -> None:
    root = project(stage, **({"distill": {}} if stage == "distill" else {}))
    before = files(root / "models") | files(root / "data/tokenizer")
    begun, run = open_stage(root, stage)
    if content is None:
        edit(root, f"seed: {begun.params.seed}", f"seed: {begun.params.seed + 1}")
    else:
        (root / "params.yaml").write_text(content)
    with torch.set_grad_enabled(stage != "evaluate"), pytest.raises(ParamsError):
        run(begun)
    assert not (root / f"metrics/{stage}.json").exists()
    assert files(root / "models") | files(root / "data/tokenizer") == before


def test_other_sections_may_be_edited_meanwhile(project: Project) -> None:
    root = project("ppo")
    stage, _ = open_stage(root, "ppo")
    edit(root, "usd_per_device_hour: 0.1", "usd_per_device_hour: 0.2")
    stage.check_params()


def test_a_stage_refuses_params_that_its_run_did_not_begin_with(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project("ppo")
    kept = root / "runs/pipeline/run-1/params.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text((root / "params.yaml").read_text())
    monkeypatch.setenv(RUN_ID_VARIABLE, "run-1")
    edit(root, "cliprange: 0.2", "cliprange: 0.3")
    assert run_main(root, "ppo") == 2
    assert "ppo.cliprange 0.2 -> 0.3" in said(capsys, "ppo")
    assert not (root / "models/ppo").exists()


@pytest.mark.integration
@pytest.mark.parametrize("processes", [None, 2])
def test_a_stage_whose_pipeline_was_killed_checkpoints_and_ends(
    project: Project, monkeypatch: pytest.MonkeyPatch, processes: int | None
) -> None:
    """Nobody watches its budget any more."""
    root = project("ppo", ppo={"updates": 500, "checkpoint_every_updates": 1000})
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as pipeline:
        try:
            monkeypatch.setenv(PIPELINE_VARIABLE, f"{pipeline.pid}:{created(pipeline.pid)}")
            code = signalled(root, "ppo", 2, signal.SIGKILL, processes, pick=lambda _: pipeline.pid)
        finally:
            pipeline.kill()
    assert code == 75
    end = attempts(root, "ppo")[-1]
    assert (end.event, end.exit_code) == ("end", 75)
    assert end.step < 500


@pytest.mark.integration
def test_a_stage_whose_terminal_is_lost_checkpoints_and_ends(project: Project) -> None:
    root = project("ppo", ppo={"updates": 500, "checkpoint_every_updates": 1000})
    assert signalled(root, "ppo", 2, signal.SIGHUP) == 75


def test_a_stage_needs_no_orchestrator(finished: Path) -> None:
    for line in (finished / "runs/ppo/attempts.jsonl").read_text().splitlines():
        assert json.loads(line)["run_id"] == "manual"
