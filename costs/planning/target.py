"""The target of a plan: devices, their number and their price."""

from dataclasses import dataclass, replace
from pathlib import Path

from config.errors import CostError
from config.records import TimedRow
from config.schema import Params
from config.sections.where import LOCAL
from config.workspace.machine import bf16_instructions
from config.workspace.timed import read_timed
from costs.planning.machine import this_machine, unmeasured, with_timings
from costs.tables.catalogue import Hardware, Price, hardware, own_price, price
from costs.tables.price import pool_of, rented_devices
from costs.tables.price import usd_per_device_hour as own_rate


@dataclass(frozen=True)
class Target:
    """The target of a plan."""

    hardware: Hardware
    price: Price
    gpus: int = 1
    rented: int = 0
    """Devices paid for while a stage runs; 0: as many as it uses."""
    root: Path = Path()
    devices_per_node: int = 8
    """Devices that reach each other over the fast links of one machine."""
    by_stage: bool = False
    """Each stage has as many devices as `where` gives it processes, instead of `gpus`."""

    by_pool: bool = False
    """A stage that is placed on a pool has that pool's device, and its price."""
    own_price: bool = False
    """The price was named apart from params.yaml: it is that of every stage."""
    timed: tuple[TimedRow, ...] = ()
    """What stages of the project took, on any device."""

    def of(self, params: Params, stage: str) -> "Target":
        """What the plan of a stage is for. Raises CostError for a pool's unknown device."""
        place = params.where.of(stage)
        target = (
            replace(
                self,
                gpus=place.processes,
                rented=rented_devices(params, stage),
                devices_per_node=place.processes // place.nodes if place.nodes > 1 else self.devices_per_node,
                by_stage=False,
            )
            if self.by_stage
            else self
        )
        if not self.by_pool:
            return target
        prices, pool = params.prices, pool_of(params, stage)
        if pool in prices.device_by_pool:
            target = replace(target, hardware=with_timings(hardware(prices.device_by_pool[pool]), self.timed))
        elif prices.watts is not None:
            target = replace(target, hardware=replace(target.hardware, watts=prices.watts))
        if pool in prices.usd_per_device_hour_by_pool and not self.own_price:
            rate = own_price(own_rate(params, stage), prices.source, prices.date)
            target = replace(target, price=rate)
        return target

    def pool_warnings(self, params: Params, stage: str) -> tuple[str, ...]:
        """Warning for a pool whose device and price are not named."""
        prices, pool = params.prices, pool_of(params, stage)
        if not self.by_pool or pool == LOCAL:
            return ()
        device = () if pool in prices.device_by_pool else (
            f"{stage} is placed on {pool}, whose device is not known: planned for "
            f"{self.hardware.name}; name it in prices.device_by_pool",
        )  # fmt: skip
        priced = self.own_price or pool in prices.usd_per_device_hour_by_pool
        return device if priced else (
            *device,
            f"{stage} is placed on {pool}, which has no price of its own: that of "
            "prices.usd_per_device_hour is taken; name it in prices.usd_per_device_hour_by_pool",
        )  # fmt: skip


def find_target(
    params: Params, name: str | None, gpus: int | None, usd_per_gpu_hour: float | None, root: Path
) -> Target:
    """The devices and their price: the catalogue's for a named device, else those of params.yaml (`prices`).

    Where neither names a device it is this machine, as `rlhf calibrate` measured it if it did. Without `gpus` each
    stage has as many as it has processes; without a named device one that is placed on a pool has the pool's.
    """
    if gpus is None:
        return replace(find_target(params, name, 1, usd_per_gpu_hour, root), by_stage=True)
    if gpus < 1:
        raise CostError(f"--gpus {gpus} must be at least 1.")
    named = name or params.prices.device
    timed = tuple(read_timed(root).rows)
    device = with_timings(hardware(named) if named else this_device(root), timed)
    if usd_per_gpu_hour is not None:
        override = own_price(usd_per_gpu_hour, "command line", "today")
        return Target(device, override, gpus, root=root, by_pool=name is None, own_price=True, timed=timed)
    if name is None:
        return Target(
            device,
            own_price(own_rate(params), params.prices.source, params.prices.date),
            gpus,
            root=root,
            by_pool=True,
            timed=timed,
        )
    return Target(device, price(device.name), gpus, root=root)


UNLIKELY = 2.0
"""A price is doubted that is this many times beyond the catalogue's range."""


def doubted_price(target: Target) -> str | None:
    """A warning if the price of an accelerator is far from the catalogue's."""
    device, paid = target.hardware, target.price.expected
    if device.is_cpu:
        return None
    try:
        expected = price(device.name)
    except CostError:
        return None
    listed = f"{device.name} is offered for {expected.low:g} to {expected.high:g} USD an hour"
    if paid > UNLIKELY * expected.high:
        return f"{paid:g} USD per device-hour: {listed}. If that is an instance's price, divide it by its devices."
    if paid < expected.low / UNLIKELY:
        return (
            f"{paid:g} USD per device-hour: {listed}. A spot instance may end at any time: runs go "
            "on from their checkpoints, and what is done twice is not planned."
        )
    return None


def this_device(root: Path) -> Hardware:
    """This machine, as `rlhf calibrate` measured it if it did."""
    return this_machine(root) or unmeasured(bf16_instructions())
