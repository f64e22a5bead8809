"""Devices and prices: names as people write them, and mistakes that say where to fix them."""

import pytest

from config.errors import CostError
from costs.tables.catalogue import GIB, _table, hardware, hardware_row, own_price, price, price_row, shape

GOOD = {"low": 1.0, "expected": 2.0, "high": 3.0, "source": "a page", "date": "2026-01-01"}
REQUIRED = (
    "v100-16",
    "v100-32",
    "t4",
    "a10g",
    "l4",
    "rtx4090",
    "a6000",
    "a100-40",
    "a100-80",
    "h100-sxm",
    "h100-pcie",
    "h200",
    "b200",
    "cpu",
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-80GB (power limit 330W)", "a100-80"),
        ("V100-32G", "v100-32"),
        ("RTX4090-24GB", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A10G-24GB", "a10g"),
        ("H100-80GB", "h100-sxm"),
        ("nvidia h200", "h200"),
        ("H100-94GB", "h100-nvl"),
        ("H100 (94GB)", "h100-nvl"),
        ("A100 (40GB)", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100-80GB-HBM3", "h100-sxm"),
        ("H20-96GB", "h20"),
    ],
)
def test_a_device_is_found_under_the_names_that_people_use(written: str, meant: str) -> None:
    assert hardware(written).name == meant


@pytest.mark.parametrize("name", REQUIRED)
def test_every_device_of_the_list_has_memory_rates_source_and_a_dated_price(name: str) -> None:
    device = hardware(name)
    assert device.usable_bytes <= device.memory_bytes
    assert device.peak("fp32") > 0
    assert device.date
    assert 0 < price(name).low <= price(name).expected <= price(name).high


def test_every_row_of_the_tables_can_be_used() -> None:
    assert all(hardware(name).bandwidth_bytes_per_second > 0 for name in _table("hardware.yaml"))
    assert all(shape(name).parameters > 0 for name in _table("shapes.yaml"))


def test_a_dtype_that_a_device_lacks_runs_at_its_fp32_rate() -> None:
    assert hardware("v100-16").peak("bf16") == 15.7e12


def test_a_device_has_the_memory_of_its_name() -> None:
    assert hardware("a100-40").memory_bytes == 40 * GIB


@pytest.mark.parametrize("name", ["A100-64GB", "A100 (64GB)", "H200-96GB", "RTX 4090 48GB", "L40S-24GB", "H20-141GB"])
def test_a_size_that_a_device_does_not_come_in_is_refused_and_not_read_as_anothers(name: str) -> None:
    with pytest.raises(CostError, match="is not known"):
        hardware(name)


def test_an_unknown_device_says_where_to_add_it() -> None:
    with pytest.raises(CostError, match=r"'a200'.*costs/tables/hardware.yaml"):
        hardware("a200")


def test_a_device_without_price_says_where_to_add_it() -> None:
    with pytest.raises(CostError, match=r"rtx3090 has no price.*costs/tables/prices.yaml"):
        price("rtx3090")


def test_a_device_row_without_its_date_is_refused() -> None:
    with pytest.raises(CostError, match="has no date"):
        hardware_row(
            "mine", {"memory_gib": 8, "fp32_tflops": 1, "bandwidth_gb_per_second": 10, "watts": 30, "source": "here"}
        )


@pytest.mark.parametrize(
    "wrong", [{"low": 0.0}, {"low": -1.0}, {"high": 1e6}, {"expected": "2"}, {"expected": True}, {"expected": None}]
)
def test_a_price_that_cannot_be_believed_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(
        CostError, match=r"price \w+=.* of mine must be above 0 and at most 1000.*costs/tables/prices.yaml"
    ):
        price_row("mine", GOOD | wrong)


def test_prices_out_of_order_are_refused() -> None:
    with pytest.raises(CostError, match="low <= expected <= high"):
        price_row("mine", GOOD | {"low": 2.5})


@pytest.mark.parametrize("date", [None, "yesterday", ""])
def test_a_price_without_a_date_is_refused(date: object) -> None:
    with pytest.raises(CostError, match="YYYY-MM-DD"):
        price_row("mine", GOOD | {"date": date})


@pytest.mark.parametrize("usd", [0.0, -1.0, 5000.0])
def test_an_own_price_that_cannot_be_believed_is_refused(usd: float) -> None:
    with pytest.raises(CostError, match=r"prices.usd_per_device_hour in params.yaml"):
        own_price(usd, "me", "2026-01-01")
