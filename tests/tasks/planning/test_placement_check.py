"""What a container would not find is refused when the run is planned, with the real dvc.yaml saying which stage reads
what.
"""

import shutil
from pathlib import Path

import pytest

from config.errors import ParamsError
from config.load import load
from config.records import stages_of
from config.schema import Params
from tasks.planning.placement_check import on_volumes, require_reachable
from tasks.planning.prepared import prepare
from tests.conftest import ROOT, TINY
from tests.support.stage_project import make_project

STAGES = stages_of("ppo")
ON_POOL = "where.default.pool=gpus"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copyfile(ROOT / "dvc.yaml", tmp_path / "dvc.yaml")
    return tmp_path


def params(*changes: str) -> Params:
    params: Params = load(TINY, [ON_POOL, *changes])
    return params


def source(path: str, kind: str = "pairs") -> str:
    return f"{{kind: file, path: {path!r}, format: {kind}, columns: {{}}}}"


def model(path: str) -> list[str]:
    return [f"model.path={path}", "model.random=null"]


def refused(root: Path, *changes: str) -> str:
    with pytest.raises(ParamsError) as fault:
        require_reachable(root, params(*changes), STAGES)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_a_data_file_of_this_machine_keeps_the_data_stage_here(root: Path) -> None:
    said = refused(root, f"data.source={source('pairs.jsonl')}")
    assert said.startswith("where.default.pool=gpus: data.source.path=pairs.jsonl is a file of this machine")
    assert "Set where.data.pool: local, or name a URL" in said
    require_reachable(root, params(f"data.source={source('pairs.jsonl')}", "where.data.pool=local"), STAGES)
    require_reachable(root, params(f"data.source={source('s3://bucket/pairs.jsonl')}"), STAGES)
    require_reachable(root, params(f"data.source={source('pairs.jsonl')}"), ["sft", "reward"])


def test_votes_that_are_not_there_yet_hold_nobody_up_and_those_that_are_would_be_lost(root: Path) -> None:
    votes = f"data.vote_source={source('votes.jsonl', 'votes')}"
    require_reachable(root, params(votes), STAGES)
    (root / "votes.jsonl").touch()
    assert "data.vote_source.path=votes.jsonl is a file of this machine" in refused(root, votes)


def test_a_model_folder_of_this_machine_keeps_all_its_readers_here(root: Path) -> None:
    readers = (
        "where.data.pool: local and where.sft.pool: local and where.reward.pool: local and where.evaluate.pool: local"
    )
    assert f"model.path=./base is a folder of this machine, and other nodes do not have it. Set {readers}" in refused(
        root, *model("./base")
    )
    (root / "org" / "base").mkdir(parents=True)
    assert "model.path=org/base is a folder" in refused(root, *model("org/base"))
    require_reachable(root, params(*model("org/of-the-hub")), STAGES)


def test_whole_paths_are_looked_for_in_the_containers_of_the_stages_that_read_them(root: Path) -> None:
    result = params(
        f"data.source={source('/volume/pairs.jsonl')}", *model("/volume/base"), "where.evaluate.pool=other"
    )
    require_reachable(root, result, STAGES)
    assert on_volumes(root, result, "gpus", STAGES) == {
        "data.source.path": "/volume/pairs.jsonl",
        "model.path": "/volume/base",
    }
    assert on_volumes(root, result, "gpus", ["sft"]) == {"model.path": "/volume/base"}
    assert on_volumes(root, result, "other", STAGES) == {"model.path": "/volume/base"}


@pytest.mark.integration
def test_a_run_is_not_planned_for_a_file_that_its_container_would_not_have(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", tmp_path / "remote", STAGES)
    pipeline = project / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("  - data.in\n", "  - data.in\n    - data/inputs/data.json\n", 1))
    for device in ("cpu", "unknown-device"):  # with a plan, and where none can be made
        with pytest.raises(
            ParamsError, match=r"where\.default\.pool=gpus: data\.source\.path=pairs\.jsonl is a file of this"
        ):
            prepare(project, params(f"data.source={source('pairs.jsonl')}", f"prices.device={device}"))
    assert not (project / "runs").exists()
