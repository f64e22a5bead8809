"""Only the section of the method that align.method names has to be there."""

from itertools import chain, combinations
from pathlib import Path

import pytest

from config.errors import ParamsError
from config.load import dump, read, validate
from config.methods.registry import METHODS
from config.records import stages_of
from config.schema import Params
from costs.ledger.budget import results_key, same_results
from costs.planning.planner import plan
from costs.planning.target import find_target
from tests.conftest import ROOT


def without(method: str, *absent: str) -> dict:
    content = read(ROOT / "recipes" / "demo.yaml")
    content["align"] = {"method": method}
    return {key: value for key, value in content.items() if key not in absent}


def unused_subsets(method: str) -> list[tuple[str, ...]]:
    others = [other for other in METHODS if other != method]
    return list(chain.from_iterable(combinations(others, size) for size in range(4)))


CASES = [(method, absent) for method in METHODS for absent in unused_subsets(method)]


@pytest.mark.parametrize(("method", "absent"), CASES)
def test_sections_of_other_methods_may_be_absent_and_stay_so(method: str, absent: tuple[str, ...]) -> None:
    content = without(method, *absent)
    params = validate(content, "here")
    assert {name for name in METHODS if getattr(params, name) is None} == set(absent)
    assert params.model_dump(mode="json") == content
    assert not any(f"{name}:" in dump(params).splitlines() for name in absent)


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_needs_no_other_methods_section(method: str, tmp_path: Path) -> None:
    others = [other for other in METHODS if other != method]
    whole, lean = (validate(without(method, *absent), "here") for absent in ([], others))
    result, planned = (plan(params, find_target(params, None, 1, None, tmp_path)) for params in (whole, lean))
    assert [stage.stage for stage in planned.stages] == list(stages_of(method))
    assert planned == result


@pytest.mark.parametrize("method", METHODS)
def test_the_section_of_the_chosen_method_is_asked_for_in_one_line(method: str) -> None:
    with pytest.raises(ParamsError) as refused:
        validate(without(method, method), "here")
    assert str(refused.value).splitlines() == [
        f"align.method={method}, and params.yaml has no section {method}. Copy it from "
        "recipes/base.yaml, or choose a method whose section is there."
    ]


def test_a_method_that_is_not_chosen_need_not_fit_the_model_but_is_checked_by_itself() -> None:
    content = without("ppo")
    content["dpo"] = content["dpo"] | {"max_length": 10**6}
    content["grpo"] = content["grpo"] | {"max_new_tokens": 10**6}
    assert validate(content, "here").align.method == "ppo"
    content["align"] = {"method": "dpo"}
    with pytest.raises(ParamsError, match=r"dpo\.max_length=1000000 does not fit"):
        validate(content, "here")
    content = without("ppo")
    content["dpo"] = content["dpo"] | {"beta": -1.0}
    with pytest.raises(ParamsError, match=r"dpo\.beta"):
        validate(content, "here")


def test_results_do_not_depend_on_the_section_of_a_method_that_is_not_chosen() -> None:
    def with_rate(section: str, rate: float) -> Params:
        content = without("ppo")
        return validate({**content, section: content[section] | {"learning_rate": rate}}, "here")

    first, lean = validate(without("ppo"), "here"), validate(without("ppo", "dpo", "grpo"), "here")
    other = with_rate("dpo", 0.5)
    assert same_results(first, lean)
    assert same_results(first, other)
    assert results_key(first) == results_key(lean) == results_key(other)
    assert results_key(with_rate("ppo", 0.5)) != results_key(first)
