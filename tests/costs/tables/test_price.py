import pytest

from config.errors import CostError
from config.load import load
from config.schema import Params
from costs.tables.price import kwh, usd_per_device_hour, watts
from tests.conftest import ROOT


def demo(*changes: str) -> Params:
    return load(ROOT / "recipes" / "demo.yaml", list(changes))


def test_without_electricity_an_hour_is_the_hourly_price() -> None:
    assert usd_per_device_hour(demo("prices.usd_per_device_hour=0.4", "prices.watts=300")) == 0.4


def test_electricity_comes_on_top() -> None:
    params = demo("prices.usd_per_device_hour=0.4", "prices.usd_per_kwh=0.3", "prices.watts=500")
    assert usd_per_device_hour(params) == pytest.approx(0.4 + 0.5 * 0.3)


def test_own_hardware_may_cost_electricity_alone() -> None:
    assert usd_per_device_hour(
        demo("prices.usd_per_device_hour=0", "prices.usd_per_kwh=0.2", "prices.watts=1000")
    ) == pytest.approx(0.2)


def test_power_is_that_of_the_device_where_none_is_given() -> None:
    assert watts(demo("prices.device=a100-80")) == 400
    assert watts(demo()) == 30
    assert watts(demo("prices.device=a100-80", "prices.watts=350")) == 350


def test_an_unknown_device_has_no_power_and_says_where_to_add_it() -> None:
    with pytest.raises(CostError, match=r"'z9'.*costs/tables/hardware\.yaml"):
        usd_per_device_hour(demo("prices.device=z9", "prices.usd_per_kwh=0.2"))


def test_a_stage_on_a_work_pool_costs_what_the_pool_does() -> None:
    params = demo(
        "where.sft.pool=gpus",
        "where.ppo.pool=spot",
        "prices.usd_per_device_hour_by_pool={gpus: 2.5}",
        "prices.usd_per_kwh=0.3",
    )
    assert usd_per_device_hour(params, "sft") == 2.5
    assert (
        usd_per_device_hour(params, "ppo") == usd_per_device_hour(params, "data") == usd_per_device_hour(params) != 2.5
    )


def test_a_stage_on_a_work_pool_draws_the_power_of_the_pools_device() -> None:
    params = demo(
        "where.ppo.pool=gpus", "prices.device_by_pool={gpus: h100-sxm}", "prices.watts=50", "prices.usd_per_kwh=0.1"
    )
    assert (watts(params), watts(params, "sft"), watts(params, "ppo")) == (50, 50, 700)
    hour = {"sft": 3600.0, "ppo": 2 * 3600.0, "contest": 3600.0}
    assert kwh(hour, params) == pytest.approx(0.05 + 2 * 0.7 + 0.05)
    on_top = usd_per_device_hour(params, "ppo") - usd_per_device_hour(params, "sft")
    assert on_top == pytest.approx(0.1 * (0.7 - 0.05))
