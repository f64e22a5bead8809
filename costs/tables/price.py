"""What time costs in a run: the hourly price of params.yaml, the electricity on top of it where that is paid apart,
and the devices that are paid for while they wait.

`StagePrice` is the only place where measured time becomes money: the ledger, the budget, the month of the retrain
cycles, MLflow and the terminal all use it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from config.records import STAGES, UsageRow
from config.schema import Params
from config.sections.where import LOCAL
from costs.tables.catalogue import hardware

OWN_DEVICE = "cpu"
"""The row of hardware.yaml that stands for this machine where no device is named."""


def pool_of(params: Params, stage: str | None) -> str:
    """The pool that a stage is placed on; `local` if it runs beside the pipeline."""
    return params.where.of(stage).pool if stage is not None else LOCAL


def rented_devices(params: Params, stage: str | None = None) -> int:
    """Devices that are paid for while a stage runs. Those beside the pipeline are rented together for the entire run,
    so that the others wait where a stage uses fewer; a pool's are rented for the stage alone. `stage` None is a
    process of the pipeline's own, such as a contest. All processes of a node's CPU share it: it is one device.
    """
    if on_cpu(params, stage):
        return nodes_of(params, stage)
    if pool_of(params, stage) != LOCAL and stage is not None:
        return params.where.of(stage).processes
    here = [stage for stage in params.stages if pool_of(params, stage) == LOCAL]
    return max((params.where.of(stage).processes for stage in here), default=1)


def on_cpu(params: Params, stage: str | None = None) -> bool:
    """Whether the device of a stage, as params.yaml names it, is a CPU; this machine is one where none is named."""
    named = params.prices.device_by_pool.get(pool_of(params, stage), params.prices.device)
    return (named or OWN_DEVICE).startswith(OWN_DEVICE)


def nodes_of(params: Params, stage: str | None) -> int:
    """Nodes that a stage runs on."""
    return params.where.of(stage).nodes if stage is not None else 1


def watts(params: Params, stage: str | None = None) -> float:
    """Power of one device under load: prices.watts, else that of its row in hardware.yaml. For a stage on a pool
    with a device in prices.device_by_pool: that device's. Raises CostError for an unknown device.
    """
    pool = pool_of(params, stage)
    if pool in params.prices.device_by_pool:
        return hardware(params.prices.device_by_pool[pool]).watts
    return params.prices.watts or hardware(params.prices.device or OWN_DEVICE).watts


def usd_per_device_hour(params: Params, stage: str | None = None) -> float:
    """usd_per_device_hour + watts / 1000 x usd_per_kwh. Host and cooling are left out unless prices.watts holds them.

    Of a stage that is placed on a pool: the pool's own price, where it has one.
    """
    prices = params.prices
    pool = pool_of(params, stage)
    if pool in prices.usd_per_device_hour_by_pool:
        return prices.usd_per_device_hour_by_pool[pool]
    return prices.usd_per_device_hour + (
        watts(params, stage) / 1000 * prices.usd_per_kwh if prices.usd_per_kwh else 0.0
    )


def usd_of(device_seconds: float, usd_per_device_hour: float) -> float:
    """US dollars for a time on devices: device_seconds x usd_per_device_hour / 3600."""
    return device_seconds * usd_per_device_hour / 3600


@dataclass(frozen=True)
class StagePrice:
    """What the time of a stage's processes costs."""

    usd_per_device_hour: float
    rented_devices: int = 1
    """Devices that are paid for at least, in use or waiting."""
    on_cpu: bool = False
    """All processes of a node share one device."""
    nodes: int = 1

    def usd(self, seconds: float, world_size: int = 1) -> float:
        """US dollars for `seconds` of wall time of `world_size` processes."""
        return self._paid(seconds, self.nodes if self.on_cpu else world_size)

    def _paid(self, seconds: float, devices: int) -> float:
        return usd_of(seconds * max(devices, self.rented_devices), self.usd_per_device_hour)

    def devices(self, row: UsageRow) -> int:
        """Devices in use by the processes of a usage row: one each, but a node's CPU is one for all."""
        return self.nodes if row.device == OWN_DEVICE else row.world_size

    def usd_of_rows(self, rows: Iterable[UsageRow]) -> float:
        """US dollars for usage rows, with what was paid beside the devices' time."""
        return sum((self._paid(row.seconds, self.devices(row)) + row.usd for row in rows), 0.0)


def stage_price(params: Params, stage: str | None = None) -> StagePrice:
    """The price of a stage's time; `stage` None is a process of the pipeline's own. Raises CostError for an unknown
    device.
    """
    rate, rented = usd_per_device_hour(params, stage), rented_devices(params, stage)
    return StagePrice(rate, rented, on_cpu(params, stage), nodes_of(params, stage))


def kwh(device_seconds: Mapping[str, float], params: Params) -> float:
    """Energy of stages' times on their devices, at the power of each in use: the sum of device_seconds / 3600 x watts
    / 1000.
    """
    return sum(
        seconds / 3600 * watts(params, stage if stage in STAGES else None) / 1000
        for stage, seconds in device_seconds.items()
    )
