import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config import jsonl
from config.errors import EnvironmentFault
from config.load import dump, load, write
from config.records import UsageRow
from config.workspace.at_work import locked
from config.workspace.rows import pipeline_rows
from tasks.run.run import Run, begin_run, end_left_open, keep_copies, keep_edits, new_run_id, put_params_back
from tests.conftest import ROOT, git

PARAMS = load(ROOT / "recipes" / "demo.yaml")


def test_one_workspace_takes_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(EnvironmentFault, match="second checkout"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom config.workspace.at_work import locked\n"
        f"with locked(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -9
    with locked(tmp_path):
        pass


def test_a_run_begins_with_complete_params_and_a_row(tmp_path: Path) -> None:
    run = begin_run(tmp_path, "r1", PARAMS, {"git.commit": "abc"})
    assert load(tmp_path / "params.yaml") == PARAMS == load(run.folder / "params.yaml")
    (row,) = pipeline_rows(tmp_path)
    assert (row.run_id, row.event, row.detail) == ("r1", "start", {"git.commit": "abc"})


def test_what_a_run_that_failed_in_its_data_asked_for_does_not_stick(tmp_path: Path) -> None:
    text = f"# mine\n{dump(PARAMS)}".encode()
    (tmp_path / "params.yaml").write_bytes(text)
    failed = begin_run(tmp_path, "r1", PARAMS.model_copy(update={"seed": 7}), {})
    assert load(tmp_path / "params.yaml").seed == 7
    assert [str(change) for change in put_params_back(failed, text)] == [f"seed {PARAMS.seed} -> 7"]
    assert (tmp_path / "params.yaml").read_bytes() == text, "comments and all"


def test_what_a_run_asked_for_stays_once_its_data_are_prepared_or_somebody_has_edited_the_file(tmp_path: Path) -> None:
    text = f"# mine\n{dump(PARAMS)}".encode()
    (tmp_path / "params.yaml").write_bytes(text)
    passed = begin_run(tmp_path, "r1", PARAMS.model_copy(update={"seed": 7}), {})
    passed.record("stage", stage="data", state="completed")
    assert put_params_back(passed, text) == []
    assert load(tmp_path / "params.yaml").seed == 7
    edited = begin_run(tmp_path, "r2", PARAMS.model_copy(update={"seed": 8}), {})
    write(PARAMS.model_copy(update={"seed": 9}), tmp_path / "params.yaml")
    assert put_params_back(edited, text) == []
    assert load(tmp_path / "params.yaml").seed == 9


def test_what_no_run_has_kept_is_copied_before_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    other = PARAMS.model_copy(update={"seed": 7})
    assert keep_edits(tmp_path, other) is None
    path.write_text(f"# mine\n{dump(PARAMS)}")
    assert keep_edits(tmp_path, PARAMS) is None, "it says the same, and stays"
    assert keep_edits(tmp_path, other) == tmp_path / "params.yaml.bak"
    assert keep_edits(tmp_path, other) == tmp_path / "params.yaml.bak", "the same once more"
    begin_run(tmp_path, "r1", other, {})
    assert keep_edits(tmp_path, PARAMS) is None, "the run has kept it"
    path.write_text("seed: not what anybody meant")
    assert keep_edits(tmp_path, PARAMS) == tmp_path / "params.yaml.bak2"
    assert (tmp_path / "params.yaml.bak").read_text().startswith("# mine\n")


def test_what_the_last_commit_has_needs_no_copy(tmp_path: Path) -> None:
    path, other = tmp_path / "params.yaml", PARAMS.model_copy(update={"seed": 7})
    path.write_text(f"# of the project\n{dump(PARAMS)}")
    git(tmp_path, "init", "--quiet")
    assert keep_edits(tmp_path, other) == tmp_path / "params.yaml.bak"
    git(tmp_path, "add", "params.yaml")
    git(tmp_path, "commit", "--quiet", "-m", "params")
    (tmp_path / "params.yaml.bak").unlink()
    assert keep_edits(tmp_path, other) is None
    path.write_text(f"# edited\n{dump(PARAMS)}")
    assert keep_edits(tmp_path, other) == tmp_path / "params.yaml.bak"


def test_runs_that_were_killed_get_an_end_and_others_no_second_one(tmp_path: Path) -> None:
    begin_run(tmp_path, "r1", PARAMS, {}).record("end", state="completed")
    begin_run(tmp_path, "r2", PARAMS, {}).record("stage", stage="data")
    for _ in range(2):
        end_left_open(tmp_path)
    rows = pipeline_rows(tmp_path)
    assert [(row.run_id, row.state) for row in rows if row.event == "end"] == [("r1", "completed"), ("r2", "killed")]


def test_a_killed_run_ended_with_the_last_row_of_its_stages(tmp_path: Path) -> None:
    """Not when somebody looked."""
    begin_run(tmp_path, "r1", PARAMS, {})
    began = pipeline_rows(tmp_path)[0].time
    row = UsageRow(
        time=began + 34.0, run_id="r1", attempt=1, step=3, phase="update", seconds=1.0, tokens=1,
        sequences=1, peak_bytes=1, device="cpu", world_size=1,
    )  # fmt: skip
    jsonl.append(tmp_path / "runs/ppo/usage.jsonl", row)
    later = row.model_copy(update={"run_id": "by-hand", "time": began + 99.0})
    jsonl.append(tmp_path / "runs/ppo/usage.jsonl", later)
    end_left_open(tmp_path)
    assert pipeline_rows(tmp_path)[-1].time == began + 34.0


def test_a_run_keeps_what_a_later_one_replaces(tmp_path: Path) -> None:
    run: Run = begin_run(tmp_path, "r1", PARAMS, {})
    outs = {"sft": ["models/sft", "metrics/sft.json", "plots/sft.csv"], "evaluate": ["evaluation/samples.jsonl"]}
    for name in ("metrics/sft.json", "plots/sft.csv", "evaluation/samples.jsonl", "report/report.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "dvc.lock").write_text("stages: {}\n")
    for stage, paths in outs.items():
        run.record("stage", stage=stage, detail={"outs": dict.fromkeys(paths, "digest")})
    keep_copies(run)
    assert not (run.folder / "report").exists(), "a report in place that the run did not make is of an earlier one"
    keep_copies(run, tmp_path / "report" / "report.html")
    (tmp_path / "metrics" / "sft.json").write_text("later")
    kept = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert kept == {
        "params.yaml",
        "dvc.lock",
        "metrics/sft.json",
        "plots/sft.csv",
        "evaluation/samples.jsonl",
        "report/report.html",
    }
    assert (run.folder / "metrics" / "sft.json").read_text() == "metrics/sft.json"


def test_a_run_that_failed_keeps_nothing_of_stages_that_it_did_not_complete(tmp_path: Path) -> None:
    for name in ("metrics/data.json", "metrics/ppo.json", "plots/ppo.csv", "evaluation/samples.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of an earlier run")
    lock = {"schema": "2.0", "stages": {name: {"cmd": name} for name in ("inputs", "data", "ppo", "dpo", "evaluate")}}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump(lock))
    run = begin_run(tmp_path, "r2", PARAMS, {})
    run.record("stage", stage="data", detail={"outs": {"data/prepared": "1.dir", "metrics/data.json": "2"}})
    run.record("end", state="failed")
    keep_copies(run)
    kept = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert kept == {"params.yaml", "dvc.lock", "metrics/data.json"}
    assert set(yaml.safe_load((run.folder / "dvc.lock").read_text())["stages"]) == {"inputs", "data", "dpo"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentFault, match=r"run\.lock cannot be written \(Permission denied\)"), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("brave-otter", "brave-otter"),
        ("less KL, / more?", "less-KL-more"),
        ("../..", "flow"),
        ("日本 1", "日本-1"),
        (None, "flow"),
    ],
)
def test_whatever_a_run_is_called_its_id_is_the_name_of_a_folder(name: str | None, words: str) -> None:
    run_id = new_run_id(name)
    assert re.fullmatch(r"\d{8}-\d{6}-(.+)", run_id)[1] == words  # type: ignore[index]
    assert len(new_run_id("x" * 500)) < 100
