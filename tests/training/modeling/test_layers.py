"""Smaller models from the layers of a larger one."""

import pytest
import torch

from config.errors import ModelError
from tests.training.support.tiny import policy, prompts
from training.modeling.layers import kept_layers, with_layers

FAMILIES = ("llama", "qwen3", "gpt2")


@pytest.mark.parametrize(
    ("total", "kept", "chosen"),
    [(6, 6, [0, 1, 2, 3, 4, 5]), (6, 2, [0, 5]), (6, 1, [0]), (5, 3, [0, 2, 4]), (30, 2, [0, 29])],
)
def test_layers_are_evenly_spaced(total: int, kept: int, chosen: list[int]) -> None:
    assert kept_layers(total, kept, "reward.layers") == chosen


def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ModelError, match=r"reward\.layers=7, and the model .* has 6\. Lower it"):
        kept_layers(6, 7, "reward.layers")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_model_itself(family: str) -> None:
    larger = policy(family=family)
    ids = torch.tensor([max(prompts(3), key=len)])
    torch.testing.assert_close(
        with_layers(larger, 2, "reward.layers").eval()(input_ids=ids).logits, larger(input_ids=ids).logits
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_one_layer_has_the_first_with_all_around_it(family: str) -> None:
    larger = policy(family=family)
    smaller = with_layers(larger, 1, "reward.layers")
    state = smaller.state_dict()
    assert 0 < len(state) < len(larger.state_dict())
    assert all(torch.equal(tensor, larger.state_dict()[name]) for name, tensor in state.items())
