"""Rates between the sizes that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.workspace.machine import Product, Sampling
from costs.planning.machine import rates
from costs.tables.measured import interpolated
from tests.costs.machines import machine


def test_halfway_between_two_sizes_is_the_geometric_mean() -> None:
    assert interpolated(((1.0, 4.0), (100.0, 16.0)), 10.0) == pytest.approx(8.0)


def test_beyond_the_ends_the_rate_stays() -> None:
    points = ((1.0, 4.0), (100.0, 16.0))
    assert (interpolated(points, 0.1), interpolated(points, 1e6)) == (4.0, 16.0)


@given(st.floats(1e-3, 1e6))
def test_nothing_lies_outside_of_what_was_measured(size: float) -> None:
    assert (
        2.0
        <= interpolated(((1.0, 2.0), (10.0, 9.0), (1000.0, 5.0)), size) * (1 + 1e-12)
        <= 9.0 * (1 + 2e-12)
    )


def test_thin_products_take_the_rate_of_thin_ones() -> None:
    products = tuple(
        Product(dtype="fp32", rows=rows, width=width, flops_per_second=rate)
        for width in (64, 1024)
        for rows, rate in ((1, 1e9), (2048, 1e11))
    )
    found = rates(machine(products=products))
    assert found.product_seconds(1e9, 1, 128) == pytest.approx(1.0)
    assert found.product_seconds(1e11, 4096, 128) == pytest.approx(1.0)


def test_a_wider_head_and_a_larger_vocabulary_take_longer() -> None:
    heads = tuple(
        Sampling(
            rows=rows,
            vocab=vocab,
            width=100,
            product_seconds=product * rows,
            draw_seconds=draw * rows,
        )
        for rows in (8, 64)
        for vocab, product, draw in ((1_000, 1e-5, 2e-5), (10_000, 5e-4, 4e-4))
    )
    found = rates(machine(sampling=heads))
    assert found.sampling_seconds(8, 1_000, 100) == pytest.approx(8 * 3e-5)
    assert found.sampling_seconds(32, 10_000, 200) == pytest.approx(32 * (2 * 5e-4 + 4e-4))


def test_adam_with_clipping_moves_ten_numbers_where_it_alone_moves_seven() -> None:
    assert rates(machine()).optimizer_seconds(2e6) == pytest.approx(2e-3 * 10 / 7)


def test_a_fused_head_pays_for_its_tiles_beside_its_arithmetic() -> None:
    found = rates(machine())
    plain, fused = (found.logit_seconds(1e6, 512, True, kind) for kind in (False, True))
    assert fused == pytest.approx(1.8 * plain + 200e6 / 1e10)
