"""Recipes that extend another, and what an incomplete file takes from its base."""

from pathlib import Path

import pytest

from config.compose import compose, missing_keys
from config.errors import ParamsError
from config.load import read
from tests.conftest import ROOT


def test_mappings_merge_and_everything_else_replaces() -> None:
    base = {"a": {"x": 1, "y": [1, 2], "z": None}, "b": 2}
    overlay = {"a": {"y": [3], "z": {"new": 1}}, "c": 3}
    expected = {"a": {"x": 1, "y": [3], "z": {"new": 1}}, "b": 2, "c": 3}
    assert compose(base, overlay) == expected
    assert base == {"a": {"x": 1, "y": [1, 2], "z": None}, "b": 2}, "the base is left as it was"
    assert compose(base, {"a": None}) == {"a": None, "b": 2}


def test_a_source_of_another_kind_replaces_and_one_of_the_same_kind_merges() -> None:
    base = {"source": {"kind": "helpdesk", "rows": 9, "quality": 0.5}}
    assert compose(base, {"source": {"kind": "file", "path": "a"}}) == {"source": {"kind": "file", "path": "a"}}
    same = compose(base, {"source": {"kind": "helpdesk", "rows": 1}})
    assert same == {"source": {"kind": "helpdesk", "rows": 1, "quality": 0.5}}
    assert compose(base, {"source": {"rows": 2}})["source"]["rows"] == 2


def test_what_is_lacking_is_named_by_its_highest_missing_key() -> None:
    base = {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "b": {"m": 1}}
    assert list(missing_keys(base, {"a": {"y": {"q": 5}}})) == ["a.x", "a.y.p", "b"]
    assert list(missing_keys(base, base)) == []


def test_a_recipe_extends_a_file_beside_it_through_several(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nsft: {epochs: 1.0, batch_size: 4}\n")
    (tmp_path / "middle.yaml").write_text("extends: base\nsft: {epochs: 2.0}\n")
    (tmp_path / "top.yaml").write_text("extends: middle.yaml\nseed: 3\n")
    assert read(tmp_path / "top.yaml") == {"seed": 3, "sft": {"epochs": 2.0, "batch_size": 4}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: top", "top.yaml -> top.yaml extend each other"),
        ("extends: [base]", r"extends=\['base'\] in .*top.yaml: the name of a recipe or of a params file"),
        ("extends: absent", "absent.yaml does not exist"),
    ],
)
def test_an_extends_that_leads_nowhere_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "top.yaml").write_text(text)
    with pytest.raises(ParamsError, match=message):
        read(tmp_path / "top.yaml")


def test_a_recipe_elsewhere_extends_one_of_the_projects_unless_one_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: base\nseed: 7\n")
    assert read(tmp_path / "mine.yaml") == {**read(ROOT / "recipes" / "base.yaml"), "seed": 7}
    (tmp_path / "base.yaml").write_text("own: 1\n")
    assert read(tmp_path / "mine.yaml") == {"own": 1, "seed": 7}
