"""Growth of cost with one factor, and its exponent."""

from dataclasses import replace

import pytest

from config.errors import CostError
from config.workspace.machine import Passes
from costs.planning.machine import device
from costs.planning.sweep import exponent, measured_exponent, sweep
from costs.tables.catalogue import price
from tests.costs.machines import machine
from tests.costs.settings import sft

A100 = price("a100-80")


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_power_law_gives_its_exponent(power: float) -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


@pytest.mark.parametrize("axis", ["data", "steps"])
def test_time_grows_in_proportion_to_data_and_steps(axis: str) -> None:
    (growth,) = sweep(sft("llama-7b", micro_batch=8), A100, axis)  # type: ignore[arg-type]
    assert growth.seconds_exponent == pytest.approx(1.0, abs=1e-6)
    assert growth.memory_exponent == 0


def test_model_growth_is_shown_at_fixed_tokens_and_with_data_that_grows() -> None:
    fixed, grown = sweep(sft("llama-7b", micro_batch=8, tokens=2048), A100, "model")
    assert fixed.kind == "fixed tokens"
    assert fixed.seconds_exponent == pytest.approx(1.0, abs=0.05)  # 6 N D at one D
    # D in proportion to N: arXiv 2203.15556
    assert grown.seconds_exponent == pytest.approx(2.0, abs=0.06)
    assert grown.points[-1].parameters > 10 * grown.points[0].parameters


def test_long_sequences_grow_towards_the_square() -> None:
    (short,) = sweep(
        sft("llama-7b", micro_batch=1, tokens=2048, checkpointing="full"),
        A100,
        "sequence",
        (1, 2, 4),
    )
    (long,) = sweep(sft("llama-7b", micro_batch=1, tokens=65536), A100, "sequence", (1, 2, 4))
    assert short.seconds_exponent == pytest.approx(1.0, abs=0.15)
    assert long.seconds_exponent > 1.6


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(CostError, match="--sweep width is not one of"):
        sweep(sft(), A100, "width")  # type: ignore[arg-type]


def test_a_calibrated_machine_says_how_its_own_trunks_grew() -> None:
    tiny = Passes(
        width=32,
        layers=2,
        heads=2,
        mlp_width=64,
        sequences=1,
        tokens=8,
        forward_seconds=1e-3,
        training_seconds=3e-3,
    )
    timed = [
        Passes(
            width=w,
            layers=2,
            heads=2,
            mlp_width=2 * w,
            sequences=4,
            tokens=64,
            forward_seconds=1e-3,
            training_seconds=1e-6 * w**1.5,
        )
        for w in (64, 128, 256)
    ]
    own = machine(passes=(tiny, *timed))
    # parameters grow with the square of the width
    assert measured_exponent(own) == pytest.approx(0.75)
    fixed, growing = sweep(
        replace(sft("llama-7b", dtype="fp32"), hardware=device(own)), A100, "model"
    )
    assert fixed.measured_exponent == pytest.approx(0.75)
    assert growing.measured_exponent == pytest.approx(1.75)
    assert sweep(sft("llama-7b"), A100, "model")[0].measured_exponent is None
