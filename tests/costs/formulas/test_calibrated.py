"""Seconds at measured rates: each part of a pass by its FLOPs and bytes, with rates that depend on
the sizes, so that a part that is looked up at another size is seen.
"""

from dataclasses import replace
from typing import Any

import pytest

from config.workspace.machine import AdamStep, Attention, Product, Sampling, Stream
from costs.formulas.calibrated import (
    adapter_gradient_seconds,
    calibrated_decode,
    calibrated_pass,
    fold_seconds,
    table_seconds,
)
from costs.formulas.setting import Levers, Setting
from costs.tables.measured import CACHE_PASSES, Measured
from costs.tables.shapes import ModelShape
from tests.costs.machines import machine
from tests.costs.settings import small, small_setting

FORWARD_OP, TRAINING_OP = 1e-6, 3e-6
SIZES = (1.0, 2.0**24)


def points(low: float, high: float) -> tuple[tuple[float, float], ...]:
    return ((SIZES[0], low), (SIZES[1], high))


OWN = Measured(
    machine(
        products=tuple(
            Product(dtype="fp32", rows=rows, width=width, flops_per_second=rate)
            for rows, width, rate in (
                (1, 1, 1e9),
                (4096, 1, 5e9),
                (1, 4096, 2e9),
                (4096, 4096, 9e10),
            )
        ),
        streams=(
            Stream(bytes=1, bytes_per_second=9e9),
            Stream(bytes=2**24, bytes_per_second=1e9),
        ),
        attention=tuple(
            Attention(
                tokens=tokens,
                head_dim=32,
                forward_flops_per_second=forward,
                training_flops_per_second=training,
            )
            for tokens, forward, training in ((1, 1e9, 2e9), (4096, 7e9, 5e9))
        ),
        sampling=tuple(
            Sampling(rows=rows, vocab=vocab, width=4, product_seconds=product, draw_seconds=draw)
            for rows, vocab, product, draw in (
                (1, 10, 1e-6, 2e-6),
                (64, 10, 3e-5, 5e-5),
                (1, 1000, 4e-5, 3e-5),
                (64, 1000, 9e-4, 8e-4),
            )
        ),
        optimizer=(AdamStep(parameters=1000, seconds=1e-5),),
    ),
    forward_op_seconds=FORWARD_OP,
    training_op_seconds=TRAINING_OP,
    forward_stream_share=points(0.3, 0.9),
    training_stream_share=points(0.5, 2.0),
    forward_logit_seconds=points(1e-9, 7e-9),
    training_logit_seconds=points(2e-9, 9e-9),
    trainer_step_seconds=1e-3,
    decode_share=0.8,
    scoring_pace=1.5,
    update_launch_pace=1.25,
    rollout_pace=1.75,
)
LAYERS, HEAD = 3 * 870, 1010
SCORES = 3 * 2 * 4 * 12 * 25
READ = {"read_tokens": 0.4}
OPERATIONS = 3 * 45 + 20


def here(
    stage: str = "sft", model: ModelShape | None = None, software: str = "ours", **chosen: Any
) -> Setting:
    setting = small_setting(READ, model=model, software=software, **({"dtype": "fp32"} | chosen))
    return replace(setting, stage=stage, hardware=replace(setting.hardware, measured=OWN))


def spent(setting: Setting, training: bool) -> float:
    """Two sequences of five tokens, four of which meet the head."""
    return calibrated_pass(setting, setting.model, setting.levers, 2, 5, 4, training)


def by_hand(
    training: bool,
    layers: float,
    head: float,
    scores: float,
    streams: float,
    size: int = 4,
    fused: bool = False,
    dtype: str = "fp32",
) -> float:
    """`layers` and `head` in passes over them, `scores` over the causal half, `streams` in bytes;
    six of the ten tokens skip the last layer's 510 feed-forward weights.
    """
    return (
        OWN.product_seconds(layers * 2 * (10 * LAYERS - 6 * 510), 10, 10, dtype)
        + OWN.product_seconds(head * 2 * 4 * HEAD, 4, 10, dtype)
        + OWN.attention_seconds(scores * SCORES / 2, 5, training)
        + OWN.stream_seconds(streams, 10 * 10 * size, training)
        + OWN.logit_seconds(4 * 101, 101, training, fused)
    )


def streams(size: int = 4) -> int:
    return size * (3 * 10 * (240 + 102) - 6 * (120 + 102))


def test_a_pass_without_gradient_is_the_sum_of_its_parts() -> None:
    assert spent(here(), False) == pytest.approx(
        by_hand(False, 1, 1, 1, streams()) + OPERATIONS * FORWARD_OP
    )
    assert spent(here(checkpointing="full", tuning="frozen"), False) == pytest.approx(
        by_hand(False, 1, 1, 1, streams()) + OPERATIONS * FORWARD_OP
    )


@pytest.mark.parametrize(("tuning", "passes"), [("full", 3), ("frozen", 2)])
@pytest.mark.parametrize("again", [0, 1])
def test_a_training_pass_is_the_sum_of_its_parts(tuning: Any, passes: int, again: int) -> None:
    setting = here(tuning=tuning, checkpointing="full" if again else "none")
    # the streamed loss makes the logits again; recomputed layers do not
    parts = by_hand(True, passes + again, passes + 1, 3.5 + again, (passes + again) * streams())
    launches = OPERATIONS * (TRAINING_OP + again * FORWARD_OP)
    tables = table_seconds(OWN, small(), setting.levers, True) if tuning == "full" else 0.0
    assert spent(setting, True) == pytest.approx(parts + launches + tables, rel=1e-9)


def test_a_head_that_sees_no_token_has_no_gradient() -> None:
    setting = here()
    found = calibrated_pass(setting, setting.model, setting.levers, 2, 5, 0, True)
    layers = OWN.product_seconds(3 * 2 * (10 * LAYERS - 6 * 510), 10, 10)
    scores = OWN.attention_seconds(3.5 * SCORES / 2, 5, True)
    around = OWN.stream_seconds(3 * streams(), 400, True) + OPERATIONS * TRAINING_OP
    tables = table_seconds(OWN, small(), setting.levers, False)
    assert found == pytest.approx(layers + scores + around + tables, rel=1e-9)


def test_a_loss_that_keeps_its_logits_does_not_make_them_again() -> None:
    whole, fused = (here(loss=name, tuning="frozen") for name in ("dense", "fused"))
    launches = OPERATIONS * TRAINING_OP
    assert spent(whole, True) == pytest.approx(
        by_hand(True, 2, 2, 3.5, 2 * streams()) + launches, rel=1e-9
    )
    assert spent(fused, True) == pytest.approx(
        by_hand(True, 2, 3, 3.5, 2 * streams(), fused=True) + launches, rel=1e-9
    )


def test_streams_are_of_the_compute_type() -> None:
    assert spent(here(dtype="bf16"), False) == pytest.approx(
        by_hand(False, 1, 1, 1, streams(2), size=2, dtype="bf16") + OPERATIONS * FORWARD_OP
    )


def test_16_bit_products_take_what_was_measured_or_are_emulated() -> None:
    fp32 = OWN.product_seconds(1e9, 4096, 4096)
    assert OWN.product_seconds(1e9, 4096, 4096, "bf16") == pytest.approx(83 * fp32)
    assert OWN.product_seconds(1e9, 4096, 4096, "tf32") == fp32
    fast = tuple(
        product.model_copy(
            update={"dtype": "bf16", "flops_per_second": 2 * product.flops_per_second}
        )
        for product in OWN.machine.products
    )
    both = OWN.machine.model_copy(update={"products": (*OWN.machine.products, *fast)})
    measured = replace(OWN, machine=both)
    assert measured.product_seconds(1e9, 4096, 4096, "bf16") == pytest.approx(fp32 / 2)
    assert measured.product_seconds(1e9, 4096, 4096) == fp32


def test_scores_above_the_diagonal_take_time_where_a_mask_or_eager_attention_computes_them() -> (
    None
):
    plain = here(tuning="frozen", micro_batch=2)
    masked = replace(plain, workload=replace(plain.workload, masked=True, mean_tokens=7))
    more = spent(masked, True) - spent(plain, True)
    assert more == pytest.approx(OWN.attention_seconds(3.5 * SCORES / 2, 5, True))
    assert spent(masked, False) == spent(plain, False)
    eager = here(attention="eager")
    whole = by_hand(False, 1, 1, 2, 4 * 3 * 10 * 342) + OPERATIONS * FORWARD_OP
    # no last layer is narrowed there
    less = OWN.product_seconds(2 * 6 * 510, 10, 10)
    assert spent(eager, False) == pytest.approx(whole + less)


@pytest.mark.parametrize(
    ("stage", "scoring", "update"),
    [
        ("ppo", 1.5, 0.25),
        ("rloo", 1.5, 0.25),
        ("evaluate", 1.5, 0.0),
        ("contest", 1.5, 0.0),
        ("sft", 1.0, 0.0),
        ("dpo", 1.0, 0.0),
    ],
)
def test_our_own_loops_have_their_pace(stage: str, scoring: float, update: float) -> None:
    assert spent(here(stage), False) == pytest.approx(scoring * spent(here(), False))
    more = update * OWN.launch_seconds(OPERATIONS, training=True)
    assert spent(here(stage), True) == pytest.approx(spent(here(), True) + more)


def test_a_machine_that_was_not_measured_has_no_seconds_of_its_own() -> None:
    setting = small_setting()
    assert spent(setting, True) == 0
    assert calibrated_decode(setting, setting.model, setting.levers, 2, 5) == 0


LORA: dict[str, Any] = {"tuning": "lora", "lora_rank": 2, "lora_modules": ("q", "down")}
FOLDED = 3 * (
    OWN.addition_seconds(8 * 120, 4 * 120)
    + OWN.product_seconds(2 * 2 * 120, 10, 12)
    + OWN.addition_seconds(8 * 170, 4 * 170)
    + OWN.product_seconds(2 * 2 * 170, 17, 10)
)
LORA_OPERATIONS = OPERATIONS + 3 * 4 * 2


def test_adapters_are_folded_once_forward_and_their_gradients_once_more() -> None:
    setting = here(**LORA)
    assert fold_seconds(OWN, setting, setting.model, setting.levers) == pytest.approx(FOLDED)
    assert spent(setting, False) == pytest.approx(
        by_hand(False, 1, 1, 1, streams()) + LORA_OPERATIONS * FORWARD_OP + FOLDED, rel=1e-9
    )
    thin = OWN.product_seconds(4 * 3 * 2 * (22 + 27) * 10, 2, 10)
    assert adapter_gradient_seconds(OWN, small(), setting.levers, 10) == pytest.approx(thin)
    assert spent(setting, True) == pytest.approx(
        by_hand(True, 2, 3, 3.5, 2 * streams()) + LORA_OPERATIONS * TRAINING_OP + 2 * FOLDED + thin,
        rel=1e-9,
    )
    again = here(checkpointing="full", **LORA)
    assert spent(again, True) == pytest.approx(
        by_hand(True, 3, 3, 4.5, 3 * streams())
        + LORA_OPERATIONS * (TRAINING_OP + FORWARD_OP)
        + 3 * FOLDED
        + thin,
        rel=1e-9,
    )


@pytest.mark.parametrize(
    "otherwise",
    [
        {"tuning": "full"},
        {"quantisation": "nf4"},
        {"lora_dropout": True},
        {"software": "transformers"},
        {"model": small(family="gpt2")},
    ],
    ids=lambda changes: "".join(changes),
)
def test_where_peft_computes_nothing_is_folded(otherwise: dict[str, Any]) -> None:
    setting = here(**(LORA | otherwise))
    assert fold_seconds(OWN, setting, setting.model, setting.levers) == 0


def test_one_adapter_of_a_packed_projection_is_folded_once() -> None:
    setting = here(model=small(family="phi3"), **(LORA | {"lora_modules": ("q", "v")}))
    packed = 10 * (12 + 6 + 6)
    assert fold_seconds(OWN, setting, setting.model, setting.levers) == pytest.approx(
        3 * (OWN.addition_seconds(8 * packed, 4 * packed) + OWN.product_seconds(4 * packed, 10, 24))
    )


@pytest.mark.parametrize(
    ("tied", "vocabulary", "accumulation", "passes"),
    [
        (False, False, 1, 1),
        (False, True, 1, 4),
        (True, True, 1, 7),
        (True, False, 1, 1),
        (False, False, 2, 4),
        (False, True, 2, 10),
        (True, True, 2, 10),
        (True, False, 3, 4),
    ],
)
def test_gradients_of_the_tables_are_passed_over_as_often_as_by_hand(
    tied: bool, vocabulary: bool, accumulation: int, passes: int
) -> None:
    found = table_seconds(OWN, small(tied=tied), Levers(accumulation=accumulation), vocabulary)
    assert found == pytest.approx(OWN.addition_seconds(passes * 4 * 1010, 4 * 1010))


@pytest.mark.parametrize(("stage", "pace"), [("sft", 1.0), ("ppo", 1.75), ("evaluate", 1.75)])
@pytest.mark.parametrize("lora", [False, True])
def test_a_decoding_step_is_the_sum_of_its_parts(stage: str, pace: float, lora: bool) -> None:
    setting = here(stage, **(LORA if lora else {"tuning": "frozen"}))
    # the layers at three tokens of one sequence each; 0.6 x 3 tokens skip the last layer's part
    parts = (
        OWN.product_seconds(2 * (3 * LAYERS - 1.8 * 510), 3, 10)
        + OWN.attention_seconds(3 * 3 * 2 * 12, 1, False)
        + OWN.stream_seconds(4 * (3 * 3 * 342 - 1.8 * 222), 3 * 10 * 4, False)
        + OWN.attention_seconds(3 * 3 * 4 * 12 * 7, 7, False)
        + OWN.addition_seconds(CACHE_PASSES * 3 * 2 * 6 * 4 * 3 * 7, 6 * 4 * 3 * 7)
    )
    beside = FOLDED + 3 * 4 * 2 * FORWARD_OP if lora else 0.0
    expected = pace * (
        OWN.decode_launch_seconds(3) + beside + OWN.sampling_seconds(3, 101, 10) + 0.8 * parts
    )
    found = calibrated_decode(setting, setting.model, setting.levers, 3, 7)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("how", "again"), [("none", 0), ("full", 1)])
def test_an_update_launches_recomputed_operations_at_its_own_pace_too(how: Any, again: int) -> None:
    update, trainer = (spent(here(stage, checkpointing=how), True) for stage in ("ppo", "sft"))
    launched = OPERATIONS * (TRAINING_OP + again * FORWARD_OP)
    assert update - trainer == pytest.approx(0.25 * launched)
