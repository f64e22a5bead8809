"""What an hour of a device costs in a run: the price of params.yaml, and the electricity on top of
it where that is paid apart.
"""

from collections.abc import Mapping

from config.records import STAGES, stages_of
from config.schema import Params
from config.sections.where import LOCAL
from costs.tables.catalogue import hardware

OWN_DEVICE = "cpu"
"""The row of hardware.yaml that stands for this machine where no device is named."""


def pool_of(params: Params, stage: str | None) -> str:
    """The work pool that a stage is placed on; `local` if it runs beside the pipeline."""
    return params.where.of(stage).pool if stage is not None else LOCAL


def rented_devices(params: Params, stage: str | None = None) -> int:
    """Devices that are paid for while a stage runs. Those beside the pipeline are rented together
    for the whole run, so that the others wait where a stage uses fewer; a work pool's are rented
    for the stage alone. `stage` None is a process of the pipeline's own, such as a contest.
    """
    place = params.where.of
    if pool_of(params, stage) != LOCAL and stage is not None:
        return place(stage).processes
    here = [each for each in stages_of(params.align.method) if pool_of(params, each) == LOCAL]
    return max((place(each).processes for each in here), default=1)


def watts(params: Params, stage: str | None = None) -> float:
    """Power of one device at work: prices.watts, else that of its row in hardware.yaml. Of a stage
    that is placed on a work pool whose device prices.device_by_pool names: that device's. Raises
    CostError for an unknown device.
    """
    pool = pool_of(params, stage)
    if pool in params.prices.device_by_pool:
        return hardware(params.prices.device_by_pool[pool]).watts
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
        watts(params, stage) / 1000 * prices.usd_per_kwh if prices.usd_per_kwh else 0.0
    )


def kwh(device_seconds: Mapping[str, float], params: Params) -> float:
    """Energy of stages' times on their devices, at the power of each at work: the sum of
    device_seconds / 3600 x watts / 1000.
    """
    return sum(
        seconds / 3600 * watts(params, stage if stage in STAGES else None) / 1000
        for stage, seconds in device_seconds.items()
    )
