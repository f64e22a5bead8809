"""DVC's view of the project after a run, with the real dvc: nothing to say, until a named file changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo

from config.inputs import write_digests
from config.load import load, write
from config.schema import Params
from tasks.dvc.inputs_stage import PIPELINE
from tasks.dvc.light_stages import do_light_stages
from tests.conftest import ROOT

STAGES = ("data", "sft", "reward", "ppo", "distill", "evaluate")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Params]:
    """Makes tmp_path a project whose stages have left metrics, with a base model, pairs and a champion's model
    beside.
    """
    monkeypatch.chdir(tmp_path)
    Repo.init(str(tmp_path), no_scm=True)
    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text("utf-8"))
    stages = {"key_metrics": pipeline["stages"]["key_metrics"]}
    stages["sft"] = {"cmd": "true", "outs": ["models/sft"]}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (tmp_path / ".dvcignore").write_text("champions\n")
    (tmp_path / "metrics").mkdir()
    for stage in STAGES:
        (tmp_path / "metrics" / f"{stage}.json").write_text('{"kl": 2.5, "steps": 9}')
    (tmp_path / "reporting").mkdir()
    (tmp_path / "reporting" / "key_metrics.py").touch()
    for folder in ("base", "champions/one", "models/sft"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "pairs.jsonl").write_text("one")

    def done(*overrides: str) -> Params:
        params = load(ROOT / "recipes" / "demo.yaml", list(overrides))
        write(params, tmp_path / "params.yaml")
        write_digests(tmp_path, params)
        do_light_stages(tmp_path, params)
        return params

    return done


def status(root: Path, stage: str = "inputs/dvc.yaml:inputs") -> Any:
    with Repo(str(root)) as repo:
        return repo.status(targets=[stage]).get(stage, [])


PAIRS = "data.source={kind: file, path: pairs.jsonl, format: pairs, columns: {}}"


def test_dvc_has_nothing_to_say_after_a_run_until_a_named_file_changes(
    tmp_path: Path, project: Callable[..., Params], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    project(PAIRS)
    assert capfd.readouterr() == ("", "")  # a run's output is its own
    assert status(tmp_path) == status(tmp_path, "key_metrics") == []
    (tmp_path / "pairs.jsonl").write_text("another")
    assert status(tmp_path) == [{"changed deps": {"pairs.jsonl": "modified"}}]
    project(PAIRS)
    assert status(tmp_path) == []


def test_a_base_model_and_votes_that_are_not_there_yet_are_watched(
    tmp_path: Path, project: Callable[..., Params]
) -> None:
    project("model.path=base", "model.random=null")
    assert status(tmp_path) == []
    (tmp_path / "base" / "weights").touch()
    (tmp_path / "data" / "labels" / "votes.jsonl").write_text("{}")
    assert status(tmp_path) == [{"changed deps": {"base": "modified", "data/labels": "modified"}}]


@pytest.mark.parametrize("path", ["models/sft", "models", "champions/one"])
def test_what_dvc_cannot_depend_on_is_looked_at_each_time(
    tmp_path: Path, project: Callable[..., Params], path: str
) -> None:
    project(f"model.path={path}", "model.random=null")
    assert status(tmp_path) == ["always changed"]
    entry = yaml.safe_load((tmp_path / PIPELINE).read_text("utf-8"))["stages"]["inputs"]
    assert path not in entry["deps"]


def test_dvc_shows_a_few_metrics_of_each_stage(tmp_path: Path, project: Callable[..., Params]) -> None:
    project()
    with Repo(str(tmp_path)) as repo:
        shown = repo.metrics.show()[""]["data"]
    assert shown == {"metrics/key.json": {"data": {"align": {"kl": 2.5}, "evaluate": {"kl": 2.5}}}}
    assert json.loads((tmp_path / "metrics/key.json").read_text("utf-8")) == {
        "align": {"kl": 2.5},
        "evaluate": {"kl": 2.5},
    }


def test_a_folder_without_dvc_is_left_without_its_record(tmp_path: Path) -> None:
    do_light_stages(tmp_path, load(ROOT / "recipes" / "demo.yaml"))
    assert not (tmp_path / PIPELINE).exists()
