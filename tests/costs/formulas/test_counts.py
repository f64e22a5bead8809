"""What a pass asks for, by hand: 870 weights a layer, 1,010 in the output head, three layers."""

from dataclasses import replace

import pytest

from benchmarks.published.engines import engine
from costs.formulas.counts import (
    dequantised_bytes,
    forward_attention_flops,
    forward_matmul_flops,
    held_weight_bytes,
    launched,
    logits_traffic,
    mfu,
    plain_operations,
    pointwise_bytes,
    spared_bytes,
    spared_flops,
    spread_bytes,
    training_flops,
    unpacked_bytes,
)
from costs.formulas.setting import Levers
from costs.tables.engines import Engine
from tests.costs.settings import sft, small, small_mixture, small_setting

LAYERS, HEAD = 3 * 870, 1010
LORA = Levers(tuning="lora", lora_rank=2, lora_modules=("q", "down"))
TRAINED = 3 * 2 * (10 + 12 + 17 + 10)


def test_a_pass_multiplies_each_token_with_every_weight() -> None:
    assert forward_matmul_flops(small(), 5) == 2 * 5 * (LAYERS + HEAD)
    assert forward_matmul_flops(small(), 5, 2) == 2 * (5 * LAYERS + 2 * HEAD)
    assert forward_matmul_flops(small(), 5, 0) == 2 * 5 * LAYERS
    assert forward_matmul_flops(small(embedding_width=7), 5) == 2 * 5 * (LAYERS + 707)
    assert forward_matmul_flops(small_mixture(), 5, 0) == 2 * 5 * 3 * (360 + 40 + 2 * 510)


def test_attention_multiplies_each_query_with_every_key_or_with_half_of_them() -> None:
    assert forward_attention_flops(small(), 2, 5, causal=False) == 3 * 2 * 4 * 12 * 25
    assert forward_attention_flops(small(), 2, 5) == 3 * 2 * 2 * 12 * 25


SCORES = 3 * 2 * 4 * 12 * 25


@pytest.mark.parametrize(
    ("levers", "matmul", "attention"),
    [
        (Levers(), 3 * (LAYERS + HEAD), 3.5 / 2),
        (Levers(attention="eager"), 3 * (LAYERS + HEAD), 3.0),
        (Levers(attention="flash"), 3 * (LAYERS + HEAD), 3.5 / 2),
        (Levers(checkpointing="full"), 4 * LAYERS + 3 * HEAD, 4.5 / 2),
        (Levers(checkpointing="full", attention="eager"), 4 * LAYERS + 3 * HEAD, 4.0),
        (Levers(tuning="frozen"), 2 * (LAYERS + HEAD), 3.5 / 2),
        (LORA, 2 * (LAYERS + HEAD) + 3 * TRAINED, 3.5 / 2),
        (replace(LORA, checkpointing="full"), 3 * LAYERS + 2 * HEAD + 3 * TRAINED, 4.5 / 2),
    ],
)
def test_a_training_pass_by_hand(levers: Levers, matmul: float, attention: float) -> None:
    assert training_flops(small(), levers, 2, 5) == (2 * 10 * matmul, SCORES * attention)


def test_scores_above_the_diagonal_are_halved_only_where_they_are_left_out() -> None:
    assert training_flops(small(), Levers(), 2, 5, causal=False)[1] == 3.5 * SCORES
    assert training_flops(small(), Levers(attention="eager"), 2, 5, causal=False)[1] == 3 * SCORES


def test_tokens_without_a_loss_spare_the_head_and_unread_ones_the_last_feed_forward_part() -> None:
    plain, recomputed = Levers(), Levers(checkpointing="full")
    head = training_flops(small(), plain, 2, 5)[0] - training_flops(small(), plain, 2, 5, 0.3)[0]
    assert head == pytest.approx(3 * 2 * 7 * HEAD)
    for levers, passes in ((plain, 3), (recomputed, 4), (Levers(tuning="frozen"), 2)):
        less = training_flops(small(), levers, 2, 5)[0]
        less -= training_flops(small(), levers, 2, 5, spared=3)[0]
        assert less == passes * 2 * 3 * 510
    assert spared_flops(small(), 3) == 2 * 510 * 3
    assert spared_flops(small_mixture(), 3) == 2 * (40 + 2 * 510) * 3


def test_utilisation_counts_six_flops_a_parameter_and_twelve_a_score() -> None:
    assert mfu(small(), 50, 5, 1000) == 50 * (6 * 4700 + 12 * 3 * 12 * 5) / 1000


OURS, FUSED = Engine("eager", fused_activation=False), Engine("fused", fused_activation=True)


@pytest.mark.parametrize(
    ("family", "software", "passes", "share"),
    [
        ("llama", OURS, 6, 1.0),
        ("gpt2", OURS, 18, 1.0),
        ("gpt2", FUSED, 3, 1.0),
        ("opt", OURS, 3, 1.0),  # its activation is no GELU in tanh form
        ("llama", replace(OURS, pointwise=0.75), 6, 0.75),
        ("llama", replace(OURS, pointwise=0.75, compiled=True), 6, 0.42),
    ],
)
def test_small_operations_pass_over_the_width_and_the_feed_forward_width(
    family: str, software: Engine, passes: float, share: float
) -> None:
    shape = small(family=family)
    for levers, size in ((Levers(), 2), (Levers(dtype="fp32"), 4)):
        assert pointwise_bytes(shape, levers, software, 7) == pytest.approx(
            3 * 7 * size * (24 * 10 + passes * 17) * share
        )
        # in one layer, half of those over the width and all over the feed-forward width
        assert spared_bytes(shape, levers, software, 7) == pytest.approx(7 * size * (12 * 10 + passes * 17) * share)


def test_a_mixture_passes_over_the_experts_that_a_token_uses() -> None:
    assert pointwise_bytes(small_mixture(), Levers(), OURS, 7) == 3 * 7 * 2 * (240 + 6 * 2 * 17)


def test_logits_are_read_and_written_at_fourteen_bytes_each() -> None:
    assert logits_traffic(small(), 7) == 2 * 14 * 101 * 7


@pytest.mark.parametrize(
    ("storage", "size"), [(None, 2.0), ("int8", 1.0), ("nf4", 0.5625), ("nf4-dq", 0.515869140625), ("int4", 0.625)]
)
def test_a_pass_reads_the_weights_as_they_are_stored(storage: str | None, size: float) -> None:
    levers = Levers(tuning="lora", quantisation=storage)
    assert held_weight_bytes(small(), levers) == pytest.approx((LAYERS + HEAD) * size)
    unpacked = LAYERS * (size + 2) if storage in ("nf4", "nf4-dq") else 0.0
    assert dequantised_bytes(small(), levers) == pytest.approx(unpacked)


def test_every_expert_is_unpacked_and_only_those_used_are_read() -> None:
    levers = Levers(tuning="lora", quantisation="nf4")
    assert dequantised_bytes(small_mixture(), levers) == 3 * (400 + 4 * 510) * 2.5625
    assert held_weight_bytes(small_mixture(), levers) == (3 * (400 + 2 * 510) + 1010) * 0.5625


def operations(levers: Levers, backward: bool, software: str = "ours", family: str = "llama") -> float:
    setting = sft(software=software)
    return launched(setting, small(family=family), levers, backward)


def test_each_layer_launches_its_operations_and_a_backward_pass_nearly_three_times_as_many() -> None:
    plain = 3 * 45 + 20
    assert plain_operations(sft(), small()) == plain
    assert plain_operations(sft(software="litgpt"), small()) == 3 * 50 + 20
    assert operations(Levers(), backward=False) == plain
    assert operations(Levers(checkpointing="full"), backward=False) == plain
    assert operations(Levers(), backward=True) == pytest.approx(2.8 * plain)
    assert operations(Levers(checkpointing="full"), backward=True) == pytest.approx(3.8 * plain)


def test_each_adapted_and_each_quantised_matrix_launches_four_more() -> None:
    plain = 3 * 45 + 20
    assert operations(LORA, backward=False) == plain + 3 * 4 * 2
    quantised = replace(LORA, quantisation="nf4")
    assert operations(quantised, backward=False) == plain + 3 * (4 * 2 + 4 * 7)
    assert operations(quantised, backward=True) == pytest.approx(2.8 * (plain + 3 * 4 * 2))
    assert operations(replace(LORA, quantisation="int8"), backward=False) == plain + 3 * 4 * 2


def test_one_adapter_serves_a_packed_projection_unless_its_parts_are_padded() -> None:
    levers = Levers(tuning="lora", lora_modules=("q", "v"))
    assert operations(levers, backward=False, family="gpt2") == 3 * 45 + 20 + 3 * 4
    assert operations(levers, backward=False, software="litgpt", family="gpt2") == (3 * 50 + 20 + 3 * 15 * 2)
    assert engine("litgpt").padded_lora


@pytest.mark.parametrize(("places", "moved"), [(1.0, 0.0), (1.5, 2.5), (3.0, 4.0)])
def test_tokens_with_several_places_in_attention_are_put_there_and_back(places: float, moved: float) -> None:
    # queries and outputs of 12, keys and values of 6
    setting = small_setting({"attention_places": places})
    result = spread_bytes(setting, setting.model, setting.levers, 7)
    assert result == pytest.approx(3 * 7 * 2 * (2 * 12 + 2 * 6) * moved)


@pytest.mark.parametrize(("storage", "size"), [("int8", 1.0), ("int4", 0.625), ("nf4", None), (None, None)])
def test_integer_weights_are_unpacked_at_the_bandwidth(storage: str | None, size: float | None) -> None:
    result = unpacked_bytes(small(), Levers(tuning="lora", quantisation=storage))
    assert result == (0.0 if size is None else LAYERS * (size + 2))
