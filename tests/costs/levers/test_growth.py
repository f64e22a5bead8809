"""Exponents of growth, and the points that they are fitted to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from config.load import load
from costs.levers.growth import at, exponent, factors, fitted, quadratic, timed, typical_seconds
from costs.planning.phases import phases
from tests.costs.settings import sft

DEMO = Path("recipes/demo.yaml")


def test_a_power_is_found_with_an_interval_that_is_as_wide_as_the_noise() -> None:
    sizes = [1.0, 2.0, 4.0]
    exact = [{"train": [size**1.5] * 5} for size in sizes]
    assert fitted(sizes, exact, 0.95, seed=1).value == pytest.approx(1.5)
    assert fitted(sizes, exact, 0.95, seed=1).low == pytest.approx(1.5)
    noisy = [{"train": [size**1.5 * x for x in (0.8, 0.9, 1, 1.1, 1.2)]} for size in sizes]
    found = fitted(sizes, noisy, 0.95, seed=1)
    assert found.low < 1.5 < found.high
    assert 0.05 < found.high - found.low < 0.6


def test_one_step_that_was_held_up_changes_nothing() -> None:
    assert typical_seconds({"a": [1.0, 1.0, 50.0], "b": [2.0]}) == 5.0


def test_each_factor_changes_what_it_names_and_the_rest_stays() -> None:
    params = timed(load(DEMO))
    by_name = {each.name: each for each in factors(params)}
    assert list(by_name) == ["model", "sequence", "batch", "responses", "data", "steps"]
    wider = at(params, by_name["model"], 2)
    assert wider.model.random is not None
    assert (wider.model.random.width, wider.model.random.mlp_width) == (192, 512)
    longer = at(params, by_name["sequence"], 3)
    assert longer.data.prompt_template == "please " * 72 + "{prompt}"
    assert longer.model.context_length == params.model.context_length + 80
    more = at(params, by_name["responses"], 4)
    assert more.ppo is not None
    assert (more.ppo.responses_per_prompt, more.ppo.batch_size) == (4, 256)
    assert at(params, by_name["data"], 4).sft.max_steps == 4 * (params.sft.max_steps or 0)
    for factor in by_name.values():
        for size in {*factor.sizes, *factor.quick}:
            at(params, factor, size)


def test_a_pretrained_model_has_one_size() -> None:
    params = timed(load(Path("recipes/smollm-cpu.yaml")))
    assert "model" not in {each.name for each in factors(params)}


def test_dpo_samples_nothing() -> None:
    params = timed(load(DEMO, ["align.method=dpo"]))
    assert [each.name for each in factors(params)] == ["model", "sequence", "batch", "data"]


def test_the_question_of_the_square_is_answered_for_both_cases() -> None:
    assert quadratic(0.9, 1.0).endswith("does not quite hold at these sizes.")
    assert "1.05th power" not in quadratic(1.0, 1.0)
    assert quadratic(1.0, 1.0).endswith("quadratic or worse holds.")


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_power_law_gives_its_exponent(power: float) -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def planned(lengths: Sequence[int], **chosen: Any) -> float:
    """The exponent of planned training time over the length of sequences."""
    seconds = [
        next(p.seconds for p in phases(sft("llama-7b", tokens=n, **chosen)) if p.name == "train")
        for n in lengths
    ]
    return exponent([float(n) for n in lengths], seconds)


def test_long_sequences_grow_towards_the_square() -> None:
    assert planned((2048, 4096, 8192), checkpointing="full") == pytest.approx(1.0, abs=0.15)
    assert planned((65536, 131072, 262144)) > 1.6
