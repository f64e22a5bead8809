"""benchmarks/worlds.py: which worlds it draws, and what it makes of their figures."""

from pathlib import Path

import pytest

from benchmarks.worlds import distribution, drawn_shape, world_params, world_seeds
from config.load import load
from config.sections.data import HelpdeskSource


def test_a_seed_says_which_worlds_and_more_of_them_begin_alike() -> None:
    assert world_seeds(7, 3) == world_seeds(7, 10)[:3]
    assert not set(world_seeds(7, 10)) & set(world_seeds(8, 10))


def test_nothing_but_the_world_differs_from_the_recipe() -> None:
    recipe, params = load(Path("recipes/demo.yaml")), world_params("recipes/demo.yaml", 12345)
    assert isinstance(params.data.source, HelpdeskSource)
    assert params.data.source.world is not None
    by_hand = params.data.source.model_copy(update={"world": None})
    data = params.data.model_copy(update={"source": by_hand})
    assert params.model_copy(update={"data": data}) == recipe


def test_shapes_differ_in_every_size_and_stay_within_the_family() -> None:
    shapes = [drawn_shape(seed) for seed in range(200)]
    for name in shapes[0]:
        assert len({shape[name] for shape in shapes}) > 1
    assert max(shape["vocabulary"] for shape in shapes) <= 300
    for seed in range(200):
        world_params("recipes/demo.yaml", seed)  # a shape that holds together


def test_the_worst_world_is_the_one_furthest_behind() -> None:
    rows = [
        {"sft_behind_demonstrations": a, "reward_behind_bayes": b, "gap_closed": c}
        for a, b, c in [(0.01, 0.02, 0.9), (0.3, 0.01, 0.2), (0.02, 0.03, 0.8)]
    ]
    found = distribution(rows)
    assert found["sft_behind_demonstrations"] == {"median": 0.02, "worst": 0.3}
    assert found["reward_behind_bayes"]["worst"] == pytest.approx(0.03)
    assert found["gap_closed"] == {"median": 0.8, "worst": 0.2}
