"""A run's own params are read as they were, also after the schema has grown."""

from pathlib import Path

import pytest
import yaml

from config.errors import ParamsError
from config.load import load, read, write
from config.records import kept_folder
from config.workspace.kept import kept_params
from tests.conftest import ROOT

RECIPE = ROOT / "recipes" / "demo.yaml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(load(RECIPE), tmp_path / "params.yaml")
    kept_folder(tmp_path, "r1").mkdir(parents=True)
    return tmp_path


def keep(root: Path, content: object) -> None:
    (kept_folder(root, "r1") / "params.yaml").write_text(yaml.safe_dump(content))


def test_a_runs_own_values_win_over_todays(root: Path) -> None:
    keep(root, {**read(RECIPE), "seed": 77})
    assert kept_params(root, "r1") == load(RECIPE, ["seed=77"])


def test_what_the_schema_gained_is_filled_in_and_nothing_else(root: Path) -> None:
    content = read(RECIPE)
    del content["retrain"], content["ppo"]["kl"]["coef"]
    content["ppo"]["batch_size"] = 64
    keep(root, content)
    assert kept_params(root, "r1") == load(RECIPE, ["ppo.batch_size=64"])


def test_another_kind_of_source_gives_no_keys(root: Path) -> None:
    content = read(RECIPE)
    content["data"]["source"] = {"kind": "file", "path": "rows.jsonl", "format": "pairs", "columns": {}}
    del content["retrain"]
    keep(root, content)
    assert kept_params(root, "r1").data.source.kind == "file"


def test_a_copy_that_is_wrong_is_told_by_its_own_mistake(root: Path) -> None:
    keep(root, {**read(RECIPE), "sed": 1})
    with pytest.raises(ParamsError, match="sed"):
        kept_params(root, "r1")


def test_a_copy_that_is_gone_is_reported(root: Path) -> None:
    with pytest.raises(ParamsError, match="does not exist"):
        kept_params(root, "r1")
