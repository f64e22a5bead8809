"""A past run is brought back by its dvc.lock, with real DVC."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.projects.checkouts import point_remote
from config.errors import EnvironmentFault, UserError
from config.load import load
from config.records import stages_of
from config.workspace.at_work import locked
from tasks.pipeline.restore import restore
from tasks.run.run import Run, begin_run, keep_copies
from tasks.run.stop import StopRequest
from tasks.stage.runner import run_stage
from tests.support.stage_project import make_project

pytestmark = pytest.mark.usefixtures("quick_stages")

STAGES = stages_of("ppo")


def completed(root: Path, run_id: str, stages: tuple[str, ...] = STAGES) -> Run:
    """A run of the project as it is."""
    run = begin_run(root, run_id, load(root / "params.yaml"), {})
    for stage in stages:
        run_stage(run, stage, StopRequest(), lambda _: None)
    run.record("end", state="completed")
    keep_copies(run)
    return run


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of different data, and other parameters of the last stage; the second is in place."""
    folder = tmp_path_factory.mktemp("restore")
    root = make_project(folder / "project", folder / "remote", STAGES)
    completed(root, "first")
    (root / "data.in").write_text("two")
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("seed: 1\n", "seed: 7\n"))
    assert (root / "params.yaml").read_text() != text
    completed(root, "second")
    return root


@pytest.fixture
def project(two_runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(two_runs.parent, tmp_path / "copy")
    return tmp_path / "copy" / "project"


def state(root: Path) -> dict[str, Any]:
    names = ("params.yaml", *(f"{stage}.out" for stage in STAGES))
    lock = yaml.safe_load((root / "dvc.lock").read_text())
    return {"dvc.lock": lock} | {name: (root / name).read_text() for name in names}


def test_a_run_comes_back_whole_and_trains_nothing(project: Path) -> None:
    second = state(project)
    done = restore(project, "first")
    assert [str(change) for change in done.changed] == ["seed 7 -> 1"]
    first = state(project)
    assert {first[f"{stage}.out"] for stage in STAGES} == {"one"}
    assert "seed: 1\n" in first["params.yaml"]
    assert "seed: 7\n" in (project / "params.yaml.bak").read_text()
    (project / "data.in").write_text("one")
    run = begin_run(project, "third", load(project / "params.yaml"), {})
    assert all(run_stage(run, s, StopRequest(), lambda _: None).cached for s in STAGES)
    restore(project, "second")
    assert state(project) == second


def test_every_restore_keeps_what_was_written_by_hand(project: Path) -> None:
    for number, name in ((2, "params.yaml.bak"), (3, "params.yaml.bak2")):
        text = (project / "params.yaml").read_text()
        (project / "params.yaml").write_text(f"# {number}\n{text}".replace("seed: ", "seed: 10"))
        assert restore(project, "first").backup == project / name
        assert (project / name).read_text().startswith(f"# {number}\n")


def test_the_run_in_place_is_brought_back_without_a_change(project: Path) -> None:
    before = state(project)
    assert restore(project, "second").backup is None
    assert state(project) == before
    assert not (project / "params.yaml.bak").exists()


def lose(root: Path, run_id: str) -> dict[Path, bytes]:
    """What DVC's cache had of a run's outputs alone, by its place in a store."""
    lock = yaml.safe_load((root / "runs" / "pipeline" / run_id / "dvc.lock").read_text())
    digests = {out["md5"] for entry in lock["stages"].values() for out in entry["outs"]}
    lost = {}
    for digest in digests:
        place = Path("files", "md5", digest[:2], digest[2:])
        lost[place] = (root / ".dvc" / "cache" / place).read_bytes()
        (root / ".dvc" / "cache" / place).unlink()
    return lost


def test_what_the_cache_has_lost_comes_from_the_remote(project: Path) -> None:
    point_remote(project, project.parent / "remote")
    for place, content in lose(project, "first").items():
        (project.parent / "remote" / place).parent.mkdir(parents=True, exist_ok=True)
        (project.parent / "remote" / place).write_bytes(content)
    restore(project, "first")
    assert state(project)["ppo.out"] == "one"


def test_where_outputs_are_gone_everything_stays(project: Path) -> None:
    before = state(project)
    lose(project, "first")
    shutil.rmtree(project.parent / "remote", ignore_errors=True)
    with pytest.raises(EnvironmentFault, match="run first cannot be brought back"):
        restore(project, "first")
    assert state(project) == before


def test_what_was_made_by_hand_is_not_overwritten(project: Path) -> None:
    before = state(project) | {"ppo.out": "by hand"}
    (project / "ppo.out").unlink()
    (project / "ppo.out").write_text("by hand")
    with pytest.raises(EnvironmentFault, match=r"dvc commit"):
        restore(project, "first")
    assert state(project) == before


def test_a_run_that_did_not_complete_is_refused(project: Path) -> None:
    completed(project, "half", STAGES[:2])
    with pytest.raises(UserError, match="half did not complete reward, ppo, evaluate"):
        restore(project, "half")


def test_a_run_at_work_is_not_disturbed(project: Path) -> None:
    with locked(project), pytest.raises(EnvironmentFault, match="already running"):
        restore(project, "first")
