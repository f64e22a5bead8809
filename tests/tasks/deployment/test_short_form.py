"""What the short form makes of a recipe; a real server takes it in tests/flows/test_deployments."""

import inspect
from typing import Any, get_args, get_type_hints

import pytest

from config.errors import ParamsError
from config.load import load
from config.schema import Params
from flows.start import start
from tasks.deployment.compose_setup import NODES, placed
from tasks.deployment.short_form import OF_THE_RECIPE, Change, wanted_params
from tests.conftest import ROOT

DEMO = load(ROOT / "recipes" / "demo.yaml")
HERE = DEMO.model_dump(mode="json")


def wanted(prefilled: dict[str, Any] = HERE, **given: Any) -> Params:
    form = inspect.signature(start.fn).parameters
    values = {name: item.default for name, item in form.items()} | given
    values["changes"] = values["changes"] or []
    return wanted_params(ROOT, prefilled, **values)


def test_the_form_as_it_comes_is_the_demo() -> None:
    assert wanted() == DEMO


def test_every_field_and_change_reaches_its_parameter() -> None:
    result = wanted(
        method="rloo",
        max_usd=0.25,
        seed=7,
        changes=[
            Change(key="rloo.learning_rate", value="1e-4"),
            {"key": " sft.lora ", "value": "null"},
            {"key": "where.default.processes", "value": 2},
        ],
    )
    assert (result.align.method, result.budget.max_usd, result.seed) == ("rloo", 0.25, 7)
    assert result.rloo is not None
    assert (result.rloo.learning_rate, result.sft.lora) == (1e-4, None)
    assert result.where.of("ppo").processes == 2


def test_every_recipe_can_be_chosen_and_is_what_its_file_says() -> None:
    names = get_args(get_type_hints(start.fn)["recipe"])
    assert {"demo", "votes-cpu", "node-8gpu"} < set(names)
    assert "base" not in names
    for name in names:
        expected = load(ROOT / "recipes" / f"{name}.yaml")
        assert wanted(recipe=name) == expected.model_copy(update={"tracking": DEMO.tracking})


def test_every_method_can_be_chosen() -> None:
    methods = get_args(get_type_hints(start.fn)["method"])
    assert methods[0] == OF_THE_RECIPE
    assert [wanted(method=name).align.method for name in methods[1:]] == list(methods[1:])


def test_a_server_of_containers_says_where_stages_run_and_what_tracks_them() -> None:
    served = placed(DEMO, NODES, "http://mlflow:5000", ())
    result = wanted(served, recipe="gpu-24gb")
    assert result.where.model_dump(mode="json") == Params.model_validate(served).where.model_dump(mode="json")
    assert result.tracking.uri == "http://mlflow:5000"
    assert result.model == load(ROOT / "recipes" / "gpu-24gb.yaml").model


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": -1}, "seed=-1 in the form:"),
        ({"max_usd": -3}, "budget.max_usd=-3 in the form:"),
        ({"changes": [{"key": "ppo.learning_rte", "value": "1"}]}, "did you mean learning_rate"),
        ({"changes": [{"key": "", "value": "1"}]}, "a row without a parameter"),
        ({"changes": [{"key": "seed=4", "value": ""}]}, "seed=4 is not the name of a parameter"),
        ({"recipe": "absent"}, "absent.yaml does not exist"),
    ],
)
def test_mistakes_are_told_in_the_words_of_the_command_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ParamsError) as raised:
        wanted(**given)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
