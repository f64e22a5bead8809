"""Printed numbers, each against what a person would write."""

import math

import pytest

from reporting.numbers import ABSENT, count, decimal, duration, memory, moment, percent, short, usd


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "$0"),
        (12.3, "$12.30"),
        (1234.5, "$1,234.50"),
        (0.0871, "$0.087"),
        (0.000123, "$0.00012"),
        (-2.5, "−$2.50"),
        (0.5, "$0.50"),
        (3e-7, "<$0.000001"),
    ],
)
def test_money_shows_cents_or_two_digits_below_them(value: float, shown: str) -> None:
    assert usd(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "40 ms"),
        (0.0004, "0.4 ms"),
        (0.1, "0.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (312, "5 min 12 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
        (3600, "1 h"),
    ],
)
def test_durations_show_their_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(940 * 2**20, "940 MiB"), (1.5 * 2**30, "1.5 GiB"), (2048, "2.0 KiB"), (500, "0.5 KiB"), (0, ABSENT)],
)
def test_memory_is_counted_in_powers_of_1024(size: float, shown: str) -> None:
    assert memory(size) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.8842, "0.884"),
        (0.041, "0.041"),
        (12.345, "12.3"),
        (-2.4, "−2.40"),
        (0.0013, "0.00130"),
        (3.2e-6, "3.20e−06"),
        (1234.5, "1,234"),
        (0, "0"),
    ],
)
def test_decimals_keep_three_digits_without_false_precision(value: float, shown: str) -> None:
    assert decimal(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(459_168, "459 k"), (1.24e6, "1.24 M"), (7e9, "7.00 B"), (950, "950")])
def test_parameter_counts_are_shortened_by_powers_of_1000(value: float, shown: str) -> None:
    assert short(value) == shown


def test_counts_percent_and_moments() -> None:
    assert (count(25_974), count(12_345_678)) == ("25,974", "12.3 M")
    assert (percent(0.8734), percent(0.95, 0), percent(-0.1)) == ("87.3%", "95%", "−10.0%")
    assert moment(0) == "1970-01-01 00:00 UTC"


def test_what_is_not_a_number_is_a_dash() -> None:
    for write in (usd, duration, memory, decimal, count, percent):
        assert write(None) == ABSENT
        assert write(math.nan) == ABSENT
    assert usd(math.inf) == ABSENT
