"""The trail behind a plan: its totals are the plan's, its terms combine to them, and it is the
whole calculation: with another input its own terms give what a new plan gives.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, exp, floor, log
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.plan import plan as plan_command
from config.errors import CostError, UserError
from config.load import load
from config.records import stages_of
from config.schema import Params
from costs.planning.explain import (
    Explanation,
    explain_params,
    inputs_below,
    roots_of,
    stage_from,
    whole_steps,
)
from costs.planning.inputs import Inputs
from costs.planning.machine import device
from costs.planning.planner import plan
from costs.planning.plans import Plan, StagePlan
from costs.planning.target import Target, target
from costs.quantities import OPERATIONS, Quantity, explained, recording
from costs.tables.catalogue import own_price
from tests.costs.machines import machine

RECIPES = sorted(path.name for path in Path("recipes").glob("*.yaml"))
COMBINED = {"max": max, "min": min, "ceil": ceil, "floor": floor, "log": log, "exp": exp}


def asked(
    recipe: str, method: str, tmp_path: Path, name: str | None = None
) -> tuple[Params, Target]:
    params = load(Path("recipes") / recipe, [f"align.method={method}"])
    return params, target(params, name, None, None, tmp_path)


def value_of(formula: str, terms: dict[str, float]) -> float:
    """A formula of the trail, worked out from its terms alone."""
    names = sorted(terms, key=len, reverse=True)
    spelt = {name: f"term{i}" for i, name in enumerate(names)}
    pattern = "|".join(re.escape(name) for name in names) or "(?!)"
    text = re.sub(rf"(?<![\w.])(?:{pattern})(?![\w.])", lambda m: spelt[m[0]], formula)
    values = {spelt[name]: value for name, value in terms.items()}
    return float(eval(text, {"__builtins__": {}}, COMBINED | values))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_total_is_the_plans_and_its_terms_combine_to_it(recipe: str, tmp_path: Path) -> None:
    for method in ("ppo", "dpo"):
        params, aim = asked(recipe, method, tmp_path)
        stages = stages_of(params.align.method)
        made = plan(params, aim, stages)
        for stage in made.stages:
            found = explain_params(params, aim, stages, stage.stage, "params.yaml")
            steps = {step.name: step for step in found.trail}
            totals = {
                "seconds": stage.seconds,
                "gpu_hours": stage.gpu_hours,
                "kwh": stage.kwh,
                "usd": stage.usd.expected,
                "peak_bytes_per_gpu": stage.peak_bytes_per_gpu,
                "device_bytes_per_gpu": stage.device_bytes_per_gpu,
            }
            assert {name: steps[name].value for name, value in totals.items() if value} == {
                name: value for name, value in totals.items() if value
            }
            timed = [phase for phase in stage.phases if phase.seconds]
            terms = steps["seconds"].terms
            assert len(terms) == len(timed)
            assert sum(terms.values()) == pytest.approx(stage.seconds)
            assert all(any(phase.phase in name for name in terms) for phase in timed)
            hold(found)


def hold(found: Explanation) -> None:
    """Every step's terms combine to its value, and an unexplained number is an input or one that
    a formula gives.
    """
    for step in found.trail:
        if step.formula:
            assert value_of(step.formula, dict(step.terms)) == pytest.approx(step.value, rel=1e-12)
        assert step.source, step.name


def test_every_phase_has_its_own_trail_to_the_inputs(tmp_path: Path) -> None:
    params, aim = asked("gpu-80gb.yaml", "ppo", tmp_path)
    stages = stages_of("ppo")
    for stage in plan(params, aim, stages).stages:
        for phase in stage.phases:
            name = f"{stage.stage}.{phase.phase}"
            found = explain_params(params, aim, stages, name, "params.yaml")
            steps = {step.name: step for step in found.trail}
            if phase.seconds:
                assert steps[f"{phase.phase}.seconds"].value == phase.seconds
                assert steps[f"{phase.phase}.usd"].value == phase.usd
            hold(found)
            # to the end: every term has a row of its own
            assert {term for step in found.trail for term in step.terms} <= steps.keys()


def test_the_whole_run_is_the_sum_of_its_stages(tmp_path: Path) -> None:
    params, aim = asked("node-8gpu.yaml", "ppo", tmp_path)
    found = explain_params(params, aim, stages_of("ppo"), "", "params.yaml")
    total = plan(params, aim).total
    steps = {step.name: step for step in found.trail}
    assert steps["total.seconds"].value == total["seconds"]
    assert steps["total.usd"].value == total["usd"]["expected"]
    assert "ppo.seconds" in steps["total.seconds"].terms
    hold(found)


def worked_out(root: Quantity, changes: dict[str, float]) -> float:
    """The value of a recorded quantity with other inputs: from its terms and operations alone."""
    known: dict[int, float] = {}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        each, ready = stack.pop()
        if id(each) in known:
            continue
        if not isinstance(each, Quantity) or not each.operation:
            factor = changes.get(each.name, 1.0) if isinstance(each, Quantity) else 1.0
            known[id(each)] = float(each) * (factor if getattr(each, "is_input", False) else 1.0)
        elif not ready:
            stack += [(each, True), *((term, False) for term in each.terms)]
        else:
            values = [known[id(term)] for term in each.terms]
            same = each.operation == "="
            known[id(each)] = values[0] if same else OPERATIONS[each.operation](*values)
    return known[id(root)]


def needs(stage: StagePlan) -> dict[str, float]:
    return {
        "seconds": stage.seconds,
        "usd": stage.usd.expected,
        "peak_bytes_per_gpu": stage.peak_bytes_per_gpu,
        "kwh": stage.kwh,
    }


def trails() -> Iterator[Any]:
    for recipe in ("demo.yaml", "gpu-24gb.yaml", "node-8gpu.yaml"):
        for method in ("ppo", "dpo", "grpo"):
            for stage in stages_of(method):
                if method == "ppo" or stage == method:
                    yield pytest.param(recipe, method, stage, False, id=f"{recipe}-{stage}")
    for stage in ("sft", "reward", "ppo", "evaluate"):
        yield pytest.param("demo.yaml", "ppo", stage, True, id=f"calibrated-{stage}")


@pytest.mark.parametrize(("recipe", "method", "stage", "calibrated"), list(trails()))
def test_the_trail_is_the_whole_calculation(
    recipe: str, method: str, stage: str, calibrated: bool, tmp_path: Path
) -> None:
    """With an input a little larger, the recorded terms give what planning anew gives: nothing of
    the calculation got lost on the way.
    """
    params, aim = asked(recipe, method, tmp_path)
    if calibrated:
        aim = Target(device(machine()), own_price(0.1, "a test", "2026-11-23"), root=tmp_path)
    make = stage_from(params, aim, "params.yaml")
    with recording():
        made = make(stage, Inputs())
    roots = {root.name: root for root in roots_of(Plan((made,)), stage, "")}
    compared = 0
    for each in inputs_below(list(roots.values())):
        if each.name.endswith("heads") or each.name in whole_steps(list(roots.values())):
            continue  # asked whether they are equal to something, which a little more is not
        gaps = [gap(make, stage, roots, each.name, 1 + change) for change in (1e-7, -1e-7)]
        if gaps == [float("inf")] * 2:
            continue  # a setting refuses anything but whole numbers of it
        # where a choice or a whole number changes just there, the other side has the same one
        assert min(gaps) < 1e-10, each.name
        compared += 1
    assert compared > 5


def gap(make: Any, stage: str, roots: dict[str, Quantity], name: str, factor: float) -> float:
    """How far the recorded terms with another input are from planning with it."""
    try:
        again = needs(make(stage, Inputs(name, factor)))
    except CostError:
        return float("inf")
    return max(
        abs(worked_out(roots[need], {name: factor}) / value - 1)
        for need, value in again.items()
        if need in roots
    )


def test_what_an_input_does_is_what_planning_again_says(tmp_path: Path) -> None:
    params, aim = asked("gpu-80gb.yaml", "ppo", tmp_path)
    found = explain_params(params, aim, stages_of("ppo"), "sft", "params.yaml")
    effects = {effect.input: effect for effect in found.effects}
    dearer = replace(aim, price=own_price(1.1 * aim.price.expected, "a test", "today"))
    before, after = (plan(params, each, ("sft",)).stages[0] for each in (aim, dearer))
    assert effects["price.expected"].usd == pytest.approx(
        after.usd.expected / before.usd.expected - 1
    )
    assert effects["price.expected"].time == 0.0
    assert effects["price.expected"].usd == pytest.approx(0.1)
    assert effects["hardware.peak_flops_per_second.bf16"].time < 0  # type: ignore[operator]
    # half a device is none
    assert effects["gpus"].time is None
    assert effects["sft.micro_batch_size"].usd is None


def test_unknown_parts_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    params, aim = asked("demo.yaml", "ppo", tmp_path)
    with pytest.raises(CostError, match=r"dpo is not a stage of this plan. Known: data, sft"):
        explain_params(params, aim, stages_of("ppo"), "dpo", "params.yaml")
    with pytest.raises(CostError, match=r"decode is not a phase of sft. Known: start, train"):
        explain_params(params, aim, stages_of("ppo"), "sft.decode", "params.yaml")


def test_plans_are_of_plain_numbers_when_nothing_is_recorded(tmp_path: Path) -> None:
    params, aim = asked("demo.yaml", "ppo", tmp_path)
    explain_params(params, aim, stages_of("ppo"), "sft", "params.yaml")
    (made,) = plan(params, aim, ("sft",)).stages
    assert type(made.seconds) is float
    assert type(made.peak_bytes_per_gpu) is float


@explained("B")
def halved(size: float) -> float:
    """Half of it. Source: arXiv 1910.02054 section 7."""
    return 0.5 * size


def test_a_formulas_result_has_its_name_meaning_and_source() -> None:
    given = Quantity(8.0)
    given.name = "size"
    with recording():
        found = halved(given)
    assert isinstance(found, Quantity)
    assert (found.name, found.unit, found.meaning) == ("halved", "B", "Half of it")
    assert found.source.endswith("test_explain.py halved; arXiv 1910.02054 section 7")
    assert float(found) == 4.0
    assert halved(8.0) == 4.0


app = typer.Typer()
app.command()(plan_command)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(
        app, ["--params", "recipes/gpu-80gb.yaml", *arguments]
    )


def test_the_table_shows_what_the_json_has() -> None:
    found = json.loads(run("--explain", "sft.train", "--json").stdout)
    shown = run("--explain", "sft.train").stdout
    assert found["of"] == "sft.train"
    for step in found["trail"]:
        assert step["name"] in shown
    for effect in found["effects"]:
        assert effect["input"] in shown


def test_a_part_without_explain_is_refused() -> None:
    result = run("sft")
    assert isinstance(result.exception, UserError)
    assert "--explain" in str(result.exception)
