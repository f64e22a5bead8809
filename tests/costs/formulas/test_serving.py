"""The price of a million tokens, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.workspace.benchmarked import Usage
from costs.formulas.serving import payback_tokens, split_method, token_price, usd_of_usage

HOUR = Usage(
    wall_seconds=3600, busy_seconds=900, input_tokens=2e6, output_tokens=1e6, prefill_seconds=300, decode_seconds=900
)


def test_allocation_pays_for_idling_and_usage_does_not() -> None:
    assert usd_of_usage(HOUR, 2.0, "allocation") == pytest.approx(2.0)
    assert usd_of_usage(HOUR, 2.0, "usage") == pytest.approx(0.5)
    assert token_price(HOUR, 2.0, "allocation").blended == pytest.approx(2.0 / 3)
    assert token_price(HOUR, 2.0, "usage").blended == pytest.approx(0.5 / 3)


def test_input_and_output_are_split_by_the_seconds_they_take() -> None:
    price = token_price(HOUR, 2.0, "allocation")
    assert price.input == pytest.approx(2.0 * 0.25 / 2)
    assert price.output == pytest.approx(2.0 * 0.75 / 1)
    assert split_method(HOUR) == "compute_time"


def test_an_output_token_costs_two_and_a_half_inputs_where_nothing_was_timed() -> None:
    untimed = HOUR.model_copy(update={"prefill_seconds": 0.0, "decode_seconds": 0.0})
    price = token_price(untimed, 2.0, "allocation")
    assert price.input is not None
    assert price.output is not None
    assert price.output == pytest.approx(2.5 * price.input)
    assert 2 * price.input + price.output == pytest.approx(2.0)
    assert split_method(untimed) == "multiplier"


def test_no_tokens_have_no_price() -> None:
    idle = Usage(wall_seconds=60, busy_seconds=0, input_tokens=0, output_tokens=0)
    assert token_price(idle, 2.0, "allocation") == (None, None, None)


@given(
    st.floats(1, 1e6), st.floats(0, 1), st.floats(1, 1e9), st.floats(1, 1e9),
    st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0.01, 100),
)  # fmt: skip
def test_both_prices_add_up_to_the_bill(
    wall: float, busy: float, read: float, written: float, prefill: float, decode: float, usd: float
) -> None:
    usage = Usage(
        wall_seconds=wall, busy_seconds=wall * busy, input_tokens=read, output_tokens=written,
        prefill_seconds=prefill, decode_seconds=decode,
    )  # fmt: skip
    for basis in ("allocation", "usage"):
        price = token_price(usage, usd, basis)
        assert price.input is not None
        assert price.output is not None
        assert price.blended is not None
        bill = usd_of_usage(usage, usd, basis)
        assert (price.input * read + price.output * written) / 1e6 == pytest.approx(bill)
        assert price.blended * (read + written) / 1e6 == pytest.approx(bill)


def test_payback_is_what_was_spent_over_what_each_token_saves() -> None:
    assert payback_tokens(0.03, 0.5, 0.2) == pytest.approx(1e5)
    assert payback_tokens(0.03, 0.2, 0.5) is None
