from dataclasses import replace

import pytest

from costs.formulas.memory import Moment
from costs.formulas.process_heap import (
    HEAP_WASTE,
    TRAINER_IMPORTS_BYTES,
    TRAINER_RUNTIME_BYTES,
    activations_in_heap,
    gradients_in_heap,
    held_by_heap,
    pass_tokens,
    with_process,
)
from costs.formulas.setting import Setting
from costs.tables.shapes import from_config
from tests.costs.settings import ppo, sft

MIB = 2**20


def tiny(tokens: int = 64, width: int = 128, vocab: int = 512, **levers: object) -> Setting:
    """A two-layer Llama in fp32 on a CPU, whose widest activation of `tokens` tokens has 16 * width
    * tokens bytes.
    """
    fields = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 4 * width,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    setting = sft(device="cpu", dtype="fp32", tokens=tokens, **levers)
    return replace(setting, model=from_config(fields, "tiny"))


def test_the_heap_holds_small_activations_and_maps_large_ones() -> None:
    assert activations_in_heap(tiny(tokens=64)) == 1
    assert activations_in_heap(tiny(tokens=8192)) == 0
    # 2 MiB of the feed-forward part are mapped, 0.5 MiB of all else are not
    some = activations_in_heap(tiny(tokens=1024))
    assert 0.3 < some < 0.7


def test_scores_of_eager_attention_are_mapped_by_their_own_size() -> None:
    assert (
        activations_in_heap(tiny(tokens=600, attention="eager"))
        < activations_in_heap(tiny(tokens=600))
        == 1
    )


def test_gradients_of_a_large_vocabulary_are_mapped() -> None:
    assert gradients_in_heap(tiny()) == 1
    large = tiny(vocab=32000)
    assert gradients_in_heap(large) == pytest.approx(1 - 32000 * 128 / large.model.parameters)
    assert gradients_in_heap(tiny(vocab=32000, tuning="lora")) == 1


MOMENTS = [
    Moment("rollout", {"policy": {"weights": 7e6, "activations": 1e6}}),
    Moment(
        "update:loss",
        {
            "policy": {"weights": 7e6, "activations": 4e6},
            "value": {"activations": 1e6, "logits": 9e6},
        },
    ),
    Moment("update:step", {"policy": {"weights": 7e6, "gradients": 3e6}}),
]


def test_the_heap_is_as_large_as_at_the_fullest_moment_of_a_phase() -> None:
    held = held_by_heap({"activations": 0.5, "gradients": 1.0}, MOMENTS)
    assert held == pytest.approx(
        {"rollout": (1 + HEAP_WASTE) * 0.5e6, "update": (1 + HEAP_WASTE) * 3e6}
    )


def test_the_process_is_a_role_that_keeps_what_the_heap_keeps() -> None:
    rollout, loss, step = with_process(tiny(), MOMENTS)
    fixed = TRAINER_IMPORTS_BYTES + TRAINER_RUNTIME_BYTES
    assert rollout.total == pytest.approx(7e6 + fixed + (1 + HEAP_WASTE) * 1e6)
    assert loss.total == pytest.approx(7e6 + 9e6 + fixed + (1 + HEAP_WASTE) * 5e6)
    # what the loss had there is free, but not given back
    assert step.total == pytest.approx(7e6 + fixed + (1 + HEAP_WASTE) * 5e6)


def test_packed_rows_leave_out_the_last_token_of_each_sequence() -> None:
    assert pass_tokens(ppo(device="cpu")) == 4 * 511
    assert pass_tokens(ppo(device="cpu", stage="rloo")) == 4 * 511
    assert pass_tokens(tiny(tokens=64)) == 64
