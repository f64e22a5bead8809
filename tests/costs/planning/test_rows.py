"""Lengths that a plan assumes before the data stage has measured them."""

from statistics import mean

import pytest

from benchmarks.worlds import drawn_shape
from config.sections.data import HelpdeskSource
from costs.planning.rows import world_tokens
from tests.support.helpdesk_rows import generate


@pytest.mark.parametrize("seed", range(8))
def test_texts_of_a_drawn_world_are_as_long_as_planned(seed: int) -> None:
    rows = {"sft_rows": 1500, "preference_rows": 500, "prompt_rows": 500}
    source = HelpdeskSource.model_validate(
        {"kind": "helpdesk", **rows, "temperature": 0.1, "quality": 0.6, "world": drawn_shape(seed)}
    )
    result, planned = generate(source, seed=1), world_tokens(source)
    end = 1
    demonstrations = [len(f"{r['prompt']} {r['completion']}".split()) + end for r in result.sft]
    prompts = [len(row["prompt"].split()) for row in result.prompts]
    for name, lengths in (("sft", demonstrations), ("prompts", prompts)):
        assert planned[name][0] == pytest.approx(mean(lengths), rel=0.12)
        assert max(lengths) <= planned[name][1]
