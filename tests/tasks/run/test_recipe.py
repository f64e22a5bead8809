import shutil
from pathlib import Path

from config.load import load
from tasks.run.recipe import differs_from_recipe
from tests.conftest import ROOT

DEMO = ROOT / "recipes" / "demo.yaml"


def test_what_was_set_is_named_against_the_nearest_recipe(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    params = load(DEMO, ["seed=9", "data.source.preference_rows=77"])
    rows = load(DEMO).data.source.model_dump()["preference_rows"]
    said = differs_from_recipe(tmp_path, params, None)
    assert said == f"params.yaml: seed 1 -> 9, data.source.preference_rows {rows} -> 77 (recipe: recipes/demo.yaml)"


def test_a_recipe_is_compared_with_what_it_extends(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "recipes" / "broken.yaml").write_text("a: [")
    said = differs_from_recipe(tmp_path, load(ROOT / "recipes" / "votes-cpu.yaml", ["seed=9"]), None)
    assert said == "params.yaml: seed 1 -> 9 (recipe: recipes/votes-cpu.yaml)"


def test_against_the_recipe_that_was_named(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {DEMO}\nseed: 5\n")
    assert differs_from_recipe(ROOT, load(recipe), recipe) is None
    assert (
        differs_from_recipe(ROOT, load(recipe, ["seed=1"]), recipe) == f"params.yaml: seed 5 -> 1 (recipe: {recipe})"
    )


def test_a_recipe_as_it_is_and_a_project_without_recipes_say_nothing(tmp_path: Path) -> None:
    assert differs_from_recipe(ROOT, load(DEMO), None) is None
    assert differs_from_recipe(tmp_path, load(DEMO), None) is None
