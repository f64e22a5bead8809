"""What an hour of a device costs in a run: the price of params.yaml, and the electricity on top of
it where that is paid apart.
"""

from config.schema import Params
from config.sections.where import LOCAL
from costs.tables.catalogue import hardware

OWN_DEVICE = "cpu"
"""The row of hardware.yaml that stands for this machine where no device is named."""


def pool_of(params: Params, stage: str | None) -> str:
    """The work pool that a stage is placed on; `local` if it runs beside the pipeline."""
    return params.where.of(stage).pool if stage is not None else LOCAL


def watts(params: Params) -> float:
    """Power of one device at work: prices.watts, else that of its row in hardware.yaml. Raises
    CostError for an unknown device.
    """
    return params.prices.watts or hardware(params.prices.device or OWN_DEVICE).watts


def usd_per_device_hour(params: Params, stage: str | None = None) -> float:
    """usd_per_device_hour + watts / 1000 x usd_per_kwh. Host and cooling are left out unless
    prices.watts holds them.

    Of a stage that is placed on a work pool: the pool's own price, where it has one.
    """
    prices = params.prices
    pool = pool_of(params, stage)
    if pool in prices.usd_per_device_hour_by_pool:
        return prices.usd_per_device_hour_by_pool[pool]
    return prices.usd_per_device_hour + (
        watts(params) / 1000 * prices.usd_per_kwh if prices.usd_per_kwh else 0.0
    )


def kwh(device_seconds: float, params: Params) -> float:
    """Energy of a time on devices, at their power at work."""
    return device_seconds / 3600 * watts(params) / 1000
