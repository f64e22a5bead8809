"""FLOPs of the update phase, by hand on a shape small enough to count."""

from benchmarks.trl_comparison.utilisation import forward_flops, linear_shapes, update_flops

SHAPE = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}
WEIGHTS = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6
"""Of one layer: query, key and value with half the heads, output, three of the feed-forward."""


def test_matrices_of_a_layer_have_its_weights() -> None:
    assert sum(rows * columns for rows, columns in linear_shapes(SHAPE)) == WEIGHTS == 120


def test_forward_counts_two_flops_a_weight_and_causal_attention_over_real_tokens() -> None:
    one = 2 * (2 * WEIGHTS * 5 + 2 * 4 * 5 * 6)
    other = 2 * (2 * WEIGHTS * 2 + 2 * 4 * 2 * 3)
    assert forward_flops(SHAPE, [3, 1], [2, 1], logits=False) == one + other == 3936


def test_logits_are_counted_at_response_tokens_only() -> None:
    without = forward_flops(SHAPE, [3, 1], [2, 1], logits=False)
    assert forward_flops(SHAPE, [3, 1], [2, 1], logits=True) - without == 2 * 4 * 10 * 3


def test_an_update_is_forward_and_twice_that_backward_of_both_trunks_each_epoch() -> None:
    assert update_flops(
        SHAPE, [3, 1], [2, 1], ppo_epochs=4, own_value_trunk=True, lora=False
    ) == 4 * 3 * (3936 + 240 + 3936)


def test_a_shared_trunk_is_counted_once_and_frozen_weights_have_no_gradient() -> None:
    assert update_flops(
        SHAPE, [3, 1], [2, 1], ppo_epochs=4, own_value_trunk=False, lora=False
    ) == 4 * 3 * (3936 + 240)
    assert update_flops(
        SHAPE, [3, 1], [2, 1], ppo_epochs=1, own_value_trunk=True, lora=True
    ) == 2 * (3936 + 240 + 3936)
