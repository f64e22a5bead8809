import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.projects.checkouts import point_remote
from config.dvc_stages import dvc_name
from config.errors import EnvironmentFault, ParamsError, StageStopped, UserError
from config.load import load
from config.workspace.at_work import locked
from config.workspace.rows import pipeline_rows
from costs.ledger.ledger import read_ledger
from tasks.cluster.placement import run_here
from tasks.dvc import reuse
from tasks.dvc.reuse import fetch_records
from tasks.dvc.status import digests, environment, is_unchanged, remove_from_lock
from tasks.dvc.transfers import push
from tasks.run.run import Run, begin_run
from tasks.run.stop import StopRequest
from tasks.stage.outcome import Outcome, StageCrashed
from tasks.stage.progress import Display, Progress, attempts
from tasks.stage.runner import log_path, run_stage
from tests.conftest import ROOT, git
from tests.support.stage_project import make_project, stale_stages

pytestmark = pytest.mark.integration
NewRun = Callable[..., Run]
STAGES = ("sft", "reward")


def bring_up(
    run: Run, stage: str = "sft", stop: StopRequest | None = None, seen: list[Progress] | None = None
) -> Outcome:
    return run_stage(run, stage, stop or StopRequest(), (seen if seen is not None else []).append)


def test_a_stage_runs_once_and_is_then_unchanged(project: Path, new_run: NewRun) -> None:
    seen: list[Progress] = []
    assert bring_up(new_run(), seen=seen) == Outcome(cached=False, attempt=1)
    assert (project / "sft.out").read_text() == "one"
    assert seen[-1].step > 0
    assert seen[-1].usd == pytest.approx(seen[-1].seconds * 0.10 / 3600)
    again: list[Progress] = []
    assert bring_up(new_run(), seen=again) == Outcome(cached=True, attempt=1, made_by="run-0")
    assert again == [], "an unchanged stage starts no process, not even that of dvc"
    assert len([row for row in attempts(project, "sft") if row.event == "start"]) == 1
    rows = [row for row in pipeline_rows(project) if row.event == "stage"]
    assert [(row.run_id, row.cached, row.attempt) for row in rows] == [("run-0", False, 1), ("run-1", True, 1)]
    assert rows[1].detail["outs"] == digests(project, "sft").outs
    assert log_path(project, "sft").read_text() == "working\n"


def test_a_changed_parameter_reruns_its_stage_and_leaves_one_that_reads_the_same_output(
    project: Path, new_run: NewRun
) -> None:
    for stage in ("sft", "reward"):
        bring_up(new_run(), stage)
    run = new_run("sft.epochs=9.0")
    assert not is_unchanged(project, "sft")
    assert bring_up(run) == Outcome(cached=False, attempt=2)
    assert bring_up(run, "reward") == Outcome(cached=True, attempt=1, made_by="run-1")


def test_a_forgotten_stage_without_a_record_is_run_again_and_what_reads_the_same_output_is_not(
    project: Path, new_run: NewRun
) -> None:
    for stage in ("sft", "reward"):
        bring_up(new_run(), stage)
    run = new_run()
    remove_from_lock(project, "sft")
    assert bring_up(run) == Outcome(cached=True, attempt=1, made_by="run-0")
    remove_from_lock(project, "sft")
    shutil.rmtree(project / ".dvc/cache/origins/run-0")
    assert bring_up(run) == Outcome(cached=False, attempt=2)
    assert bring_up(run, "reward") == Outcome(cached=True, attempt=1, made_by="run-1")


def makers(project: Path, new_run: NewRun, *overrides: str) -> list[str]:
    """The runs that made what a run of both stages uses; empty where a process did."""
    run = new_run(*overrides)
    return [bring_up(run, stage).made_by for stage in ("sft", "reward")]


def test_going_back_to_a_recipe_starts_no_process_and_names_the_run_that_was_paid(
    project: Path, new_run: NewRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert makers(project, new_run) == ["", ""]
    assert makers(project, new_run, "sft.epochs=9.0", "reward.epochs=9.0") == ["", ""]
    started = len(attempts(project, "sft"))
    assert stale_stages(project, load(project / "params.yaml", ["sft.epochs=1.0", "reward.epochs=1.0"]), STAGES) == []
    assert makers(project, new_run, "sft.epochs=1.0", "reward.epochs=1.0") == ["run-0", "run-0"]
    assert len(attempts(project, "sft")) == started
    assert is_unchanged(project, "sft")
    ledger = read_ledger(project, load(project / "params.yaml"), "run-2")
    before = read_ledger(project, load(project / "params.yaml"), "run-0")
    assert [stage.made_by for stage in ledger.stages] == ["run-0", "run-0"]
    assert ledger.saved_usd == pytest.approx(before.total_usd)
    assert ledger.total_usd == 0
    assert makers(project, new_run, "sft.epochs=9.0", "reward.epochs=9.0", "prices.usd_per_device_hour=7") == [
        "run-1",
        "run-1",
    ]


def test_a_damaged_or_lost_output_of_an_earlier_run_is_noticed_and_made_again(
    project: Path, new_run: NewRun, capfd: pytest.CaptureFixture[str]
) -> None:
    first = ("sft.epochs=1.0",)
    for overrides in (first, ("sft.epochs=9.0",)):
        bring_up(new_run(*overrides))
    (project / "sft.out").write_text("of another recipe")
    entry = json.loads((project / ".dvc/cache/origins/run-0/sft.json").read_text())["entry"]
    digest = entry["outs"][0]["md5"]
    cached = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.chmod(0o644)
    cached.write_bytes(b"damaged")
    cached.chmod(0o444)  # DVC trusts what is write-protected
    bring_up(new_run(*first))
    assert "sft was made by run run-0, but its outputs are damaged" in capfd.readouterr().err
    assert is_unchanged(project, "sft")
    assert "damaged" not in (project / "sft.out").read_text()


def test_a_remote_that_does_not_answer_holds_up_no_plan(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "REMOTE_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(reuse, "exchange_records", lambda repo, root: time.sleep(3))
    began = time.monotonic()
    fetch_records(project)
    assert time.monotonic() - began < 2


def test_what_one_checkout_made_another_one_takes_from_the_remote(
    project: Path, new_run: NewRun, tmp_path: Path
) -> None:
    assert makers(project, new_run) == ["", ""]
    assert push(project) is None
    assert makers(project, new_run, "sft.epochs=9.0") == ["", "run-0"]
    assert push(project) is None
    other = make_project(tmp_path / "other", tmp_path / "remote", ["sft", "reward"])
    params = load(other / "params.yaml")
    assert stale_stages(other, params, STAGES) == ["sft", "reward"]
    fetch_records(other)
    assert stale_stages(other, params, STAGES) == []
    run = begin_run(other, "elsewhere", params, {})
    assert [bring_up(run, stage) for stage in ("sft", "reward")] == [Outcome(True, None, "run-0")] * 2
    ledger = read_ledger(other, params, "elsewhere")
    before = read_ledger(project, params, "run-0")
    assert ledger.saved_usd == pytest.approx(before.total_usd)
    shutil.rmtree(tmp_path / "remote" / "files")
    shutil.rmtree(other / ".dvc/cache/files")
    assert stale_stages(other, params, STAGES) == ["sft", "reward"], "lost outputs are planned"


@pytest.fixture
def methods(tmp_path: Path) -> Path:
    """A project whose stage `align` and what it makes are those of the project's own dvc.yaml; each training adds a
    line to trained.txt.
    """
    root = make_project(tmp_path / "methods", tmp_path / "remote-of-methods", ["sft", "evaluate"])
    pipeline = yaml.safe_load((root / "dvc.yaml").read_text())
    align = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["align"]
    align["do"]["cmd"] = "sh align.sh ${item}"
    align["do"]["deps"] = ["sft.out"]
    (root / "align.sh").write_text(
        "echo $1 >> trained.txt && test ! -e broken && mkdir -p models/$1 plots metrics && cat "
        "sft.out params.yaml > models/$1/weights"
        " && touch plots/$1.csv && echo {} > metrics/$1.json\n"
    )
    # as in the project's own dvc.yaml: the chosen model is a dependency, and the outputs may be deleted
    evaluate = {
        "cmd": "echo ${align.method} > evaluate.in && python stage.py evaluate",
        "deps": ["models/${align.method}"],
        "params": ["align"],
    }
    pipeline["stages"]["evaluate"] |= {**evaluate, "outs": ["evaluate.out"]}
    pipeline["stages"]["align"] = align
    (root / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    return root


def trained(root: Path) -> list[str]:
    return (root / "trained.txt").read_text().split()


def dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(
        command, cwd=root, env=environment(RLHF_RUN_ID="by-hand"), capture_output=True, text=True, check=False
    )


def test_going_back_to_a_method_trains_nothing_and_takes_its_evaluation_from_the_run_cache(methods: Path) -> None:
    said = {}
    for number, method in enumerate(("ppo", "dpo", "ppo")):
        wanted = load(methods / "params.yaml", [f"align.method={method}"])
        assert stale_stages(methods, wanted, [method]) == ([] if number == 2 else [method])
        run = begin_run(methods, f"run-{number}", wanted, {})
        bring_up(run, "sft")
        assert is_unchanged(methods, method) is (number == 2)
        subprocess.run(
            [sys.executable, "-m", "dvc", "repro", "--single-item", dvc_name(method)],
            cwd=methods,
            env=environment(),
            check=True,
            capture_output=True,
        )
        said[number] = (bring_up(run, "evaluate"), (methods / "evaluate.out").read_text().strip())
        assert digests(methods, method).outs.keys() == {
            f"models/{method}",
            f"plots/{method}.csv",
            f"metrics/{method}.json",
        }
    assert said == {
        0: (Outcome(False, 1), "ppo"),
        1: (Outcome(False, 2), "dpo"),
        2: (Outcome(True, 1, "run-0"), "ppo"),
    }
    assert trained(methods) == ["ppo", "dpo"]


@pytest.mark.slow
def test_dvc_itself_trains_only_the_method_that_params_yaml_names(methods: Path) -> None:
    for method, so_far in (("ppo", ["ppo"]), ("dpo", ["ppo", "dpo"]), ("ppo", ["ppo", "dpo"])):
        begin_run(methods, "run-0", load(methods / "params.yaml", [f"align.method={method}"]), {})
        done = dvc(methods, "repro")
        assert done.returncode == 0, done.stderr
        assert trained(methods) == so_far
    git(methods, "add", "--all")
    git(methods, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=runs")
    done = dvc(methods, "exp", "run", "-S", "ppo.learning_rate=1e-4")
    assert done.returncode == 0, done.stderr
    assert trained(methods) == ["ppo", "dpo", "ppo"]


def test_the_model_stays_as_it_was_where_training_it_again_fails(methods: Path) -> None:
    begin_run(methods, "run-0", load(methods / "params.yaml"), {})
    assert dvc(methods, "repro").returncode == 0
    before = (methods / "models/ppo/weights").read_bytes()
    begin_run(methods, "run-1", load(methods / "params.yaml", ["ppo.learning_rate=1e-4"]), {})
    (methods / "broken").touch()
    assert dvc(methods, "repro").returncode != 0
    assert trained(methods) == ["ppo", "ppo"]
    assert (methods / "models/ppo/weights").read_bytes() == before
    assert not is_unchanged(methods, "ppo")


def edit_epochs(project: Path, epochs: float) -> None:
    content = yaml.safe_load((project / "params.yaml").read_text())
    content["sft"]["epochs"] = epochs
    (project / "params.yaml").write_text(yaml.safe_dump(content))


def test_params_edited_between_two_stages_are_refused_also_where_a_stage_would_be_unchanged(
    project: Path, new_run: NewRun
) -> None:
    bring_up(new_run())
    before = load(project / "params.yaml").sft.epochs
    run = new_run("sft.epochs=9.0")
    edit_epochs(project, before)
    assert is_unchanged(project, "sft")
    with pytest.raises(ParamsError, match=f"sft.epochs 9.0 -> {before}"):
        run_here(run, "sft", StopRequest(), lambda progress: None)
    edit_epochs(project, 9.0)
    assert run_here(run, "sft", StopRequest(), lambda progress: None) == Outcome(cached=False, attempt=2)


@pytest.mark.parametrize("outs", [[{"sft.out": {"persist": True}}], ["sft.out"]], ids=["persist", "in the run cache"])
def test_params_edited_just_before_dvc_reads_them_are_not_recorded_for_what_others_made(
    project: Path, new_run: NewRun, outs: list[Any]
) -> None:
    pipeline = yaml.safe_load((project / "dvc.yaml").read_text())
    pipeline["stages"]["sft"]["cmd"] += " && cp edited.yaml params.yaml"
    pipeline["stages"]["sft"]["outs"] = outs
    (project / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    run = new_run()
    content = yaml.safe_load((project / "params.yaml").read_text())
    content["sft"]["epochs"] = 9.0
    (project / "edited.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ParamsError, match=r"-> 9\.0"):
        bring_up(run)
    assert not (project / "dvc.lock").exists()
    assert not is_unchanged(project, "sft")
    assert bring_up(new_run("sft.epochs=9.0")) == Outcome(cached=False, attempt=2)


@pytest.mark.slow
def test_a_failed_experiment_of_dvc_beside_a_run_is_refused_by_the_next_stage(project: Path, new_run: NewRun) -> None:
    run = new_run()
    bring_up(run)
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=start")
    (project / "behaviour.txt").write_text("bad input")
    command = [sys.executable, "-m", "dvc", "exp", "run", "--set-param", "reward.epochs=9.0"]
    done = subprocess.run(
        command, cwd=project, env=environment(RLHF_RUN_ID="experiment"), check=False, capture_output=True
    )
    assert done.returncode
    assert load(project / "params.yaml").reward.epochs == 9.0
    with pytest.raises(ParamsError, match=r"reward\.epochs"):
        run_here(run, "reward", StopRequest(), lambda progress: None)


@pytest.mark.parametrize(
    ("figures", "unchanged"),
    [pytest.param({"rows_quarantined": 9}, True, marks=pytest.mark.slow), ({"bayes_accuracy": 0.8}, False)],
)
def test_a_stage_that_reads_some_figures_of_another_is_redone_for_those_alone(
    project: Path, new_run: NewRun, figures: dict[str, float], unchanged: bool
) -> None:
    read = next(
        item
        for item in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["reward"]["params"]
        if isinstance(item, dict)
    )
    pipeline = yaml.safe_load((project / "dvc.yaml").read_text())
    pipeline["stages"]["sft"] |= {
        "cmd": "cp metrics.in metrics/data.json && python stage.py sft",
        "metrics": ["metrics/data.json"],
    }
    pipeline["stages"]["sft"]["deps"].append("metrics.in")
    pipeline["stages"]["reward"]["params"].append(read)
    (project / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    before = {"rows_quarantined": 1, "bayes_accuracy": None, "baseline_longer_wins": 0.5, "baseline_bow": 0.6}
    (project / "metrics").mkdir()
    for content in (before, before | figures):
        (project / "metrics.in").write_text(json.dumps(content))
        run = new_run()
        assert not bring_up(run).cached
        result = bring_up(run, "reward")
    assert result.cached == unchanged


def test_a_price_changes_nothing(project: Path, new_run: NewRun) -> None:
    bring_up(new_run())
    assert bring_up(new_run("prices.usd_per_device_hour=3.0")).cached


def test_a_progress_line_that_nobody_reads_any_more_ends_no_stage(
    project: Path, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        display = Display()
        display.LINE_EVERY_SECONDS = 0.0
        assert run_stage(new_run(), "sft", StopRequest(), display.show) == Outcome(cached=False, attempt=1)
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            broken.close()


def test_an_error_beside_a_stage_lets_it_checkpoint(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("slow")

    def observe(progress: Progress) -> None:
        if progress.step >= 2:
            raise ZeroDivisionError("of the test")

    with pytest.raises(ZeroDivisionError):
        run_stage(new_run(), "sft", StopRequest(), observe)
    assert [(row.event, row.exit_code) for row in attempts(project, "sft")] == [("start", None), ("end", 75)]


def test_bad_input_is_the_stages_own_line(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("bad input")
    with pytest.raises(UserError, match=r"^sft: data/x\.json is empty\. Fetch it again\.$"):
        bring_up(new_run())


def test_a_killed_stage_is_a_crash_and_goes_on_from_its_checkpoint(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("killed once")
    with pytest.raises(StageCrashed) as crash:
        bring_up(new_run())
    assert not crash.value.hopeless
    assert bring_up(new_run()) == Outcome(cached=False, attempt=2)
    assert [(row.attempt, row.step) for row in attempts(project, "sft") if row.event == "resume"] == [(2, 3)]


def test_a_stage_killed_before_its_first_row_is_tried_again_and_paid_for(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("killed early")
    with pytest.raises(StageCrashed, match="was killed without") as crash:
        bring_up(new_run())
    assert not crash.value.hopeless
    (row,) = attempts(project, "sft")
    assert row.event == "lost"
    assert row.lived_seconds is not None
    assert row.lived_seconds > 0.6
    (project / "behaviour.txt").unlink()
    assert bring_up(new_run()) == Outcome(cached=False, attempt=2)


def test_a_failure_that_repeats_word_for_word_is_hopeless(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("fails alike")
    with pytest.raises(StageCrashed, match="division by zero") as first:
        bring_up(new_run())
    with pytest.raises(StageCrashed) as second:
        bring_up(new_run())
    assert (first.value.hopeless, second.value.hopeless) == (False, True)


def test_a_process_that_does_not_begin_is_hopeless_and_says_why(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("broken")
    with pytest.raises(StageCrashed, match="no module named nothing") as crash:
        bring_up(new_run())
    assert crash.value.hopeless


def test_an_output_that_was_not_made_is_not_taken_for_done(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("forgets")
    with pytest.raises(EnvironmentFault, match=r"sft is done, but DVC could not keep its outputs.*sft\.out"):
        bring_up(new_run())


def test_a_missing_input_is_dvcs_line(project: Path, new_run: NewRun) -> None:
    (project / "sft.in").unlink()
    with pytest.raises(EnvironmentFault, match=r"sft\.in"):
        bring_up(new_run())


def test_a_stop_request_reaches_the_stage_and_nothing_is_lost(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("slow")
    stop = StopRequest()
    timer = threading.Thread(target=lambda: (await_rows(project), stop.handle(signal.SIGTERM, None)))
    timer.start()
    with pytest.raises(StageStopped, match=r"asked to stop after step [1-7]"):
        bring_up(new_run(), stop=stop)
    timer.join()
    (project / "behaviour.txt").unlink()
    assert bring_up(new_run()) == Outcome(cached=False, attempt=2)
    assert any(row.event == "resume" for row in attempts(project, "sft"))


def test_insisting_ends_the_stage_at_once(project: Path, new_run: NewRun) -> None:
    (project / "behaviour.txt").write_text("slow")
    stop = StopRequest()

    def ask_twice() -> None:
        await_rows(project)
        stop.requests = 2

    timer = threading.Thread(target=ask_twice)
    timer.start()
    with pytest.raises(StageStopped, match="at once"):
        bring_up(new_run(), stop=stop)
    timer.join()
    assert not psutil.pid_exists(attempts(project, "sft")[0].pid)
    assert not [row for row in attempts(project, "sft") if row.event == "end"]


def test_a_request_before_a_stage_starts_nothing(project: Path, new_run: NewRun) -> None:
    stop = StopRequest()
    stop.handle(signal.SIGINT, None)
    with pytest.raises(StageStopped, match=r"before sft, as asked\. Everything before"):
        bring_up(new_run(), stop=stop)
    assert attempts(project, "sft") == []


HOLDING = """
import sys
from pathlib import Path
from config.load import load
from config.workspace.at_work import locked
from tasks.run.run import Run
from tasks.run.stop import StopRequest
from tasks.stage.runner import run_stage
root = Path.cwd()
with locked(root):
    run_stage(Run(root, "x", load(root / "params.yaml")), "sft", StopRequest(), lambda _: None)
"""


def test_a_stage_of_a_killed_run_holds_the_workspace_until_it_has_checkpointed(
    project: Path, new_run: NewRun, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "behaviour.txt").write_text("slow")
    new_run()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as remaining:
        await_rows(project)
        remaining.kill()
        remaining.wait()
        stage = psutil.Process(attempts(project, "sft")[-1].pid)
        assert stage.is_running()
        with locked(project):
            assert attempts(project, "sft")[-1].exit_code == 75
            psutil.wait_procs([stage], timeout=5)
            assert not stage.is_running()
    assert f"process {remaining.pid} was killed" in capfd.readouterr().err


def test_outputs_are_pushed_once(project: Path, new_run: NewRun, tmp_path: Path) -> None:
    bring_up(new_run())
    (project / ".rlhf").mkdir()
    assert push(project) is None
    pushed = [path for path in (tmp_path / "remote" / "files").rglob("*") if path.is_file()]
    assert [path.read_text() for path in pushed] == ["one"]
    pushed[0].unlink()
    assert push(project) is None
    assert not pushed[0].exists(), "an unchanged lock asks nobody"


def test_what_one_remote_has_is_pushed_to_another_one_too(project: Path, new_run: NewRun, tmp_path: Path) -> None:
    bring_up(new_run())
    for name in ("remote", "second"):
        point_remote(project, tmp_path / name)
        assert push(project) is None
        assert [path.read_text() for path in (tmp_path / name / "files").rglob("*") if path.is_file()] == ["one"]


def test_an_unreachable_remote_is_a_line_and_not_a_failure(project: Path, new_run: NewRun, tmp_path: Path) -> None:
    bring_up(new_run())
    (project / ".rlhf").mkdir()
    (tmp_path / "remote").write_text("a file where the folder should be")
    fault = push(project)
    assert fault is not None
    assert "dvc push" in fault
    assert "\n" not in fault


def await_rows(project: Path) -> None:
    deadline = time.monotonic() + 60
    while not (project / "runs" / "sft" / "usage.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
