"""Devices that are rented together and wait while a stage of the run uses fewer of them."""

from collections.abc import Sequence

from costs.planning.plans import StagePlan


def idle_device_seconds(used: Sequence[tuple[int, int, float]]) -> float:
    """Seconds x devices that are paid and not used.

    used: (devices at work, devices paid for, seconds) of each stage.
    """
    return sum((paid - devices) * seconds for devices, paid, seconds in used)


def idle_note(stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """One line where devices wait, none where all stages use what is rented for them."""
    idle = idle_device_seconds([(stage.gpus, stage.rented, stage.seconds) for stage in stages])
    if not idle:
        return ()
    fewer = [stage for stage in stages if stage.gpus < stage.rented]
    names = ", ".join(f"{stage.stage} ({stage.gpus})" for stage in fewer)
    usd = sum(stage.idle_usd for stage in fewer)
    return (
        f"{max(stage.rented for stage in fewer)} devices are rented together: those that wait "
        f"while {names} run take {idle / 3600:.3g} device-hours, {usd:.4g} USD, in these stages' "
        "cost; place them on a pool of their own with where.STAGE.pool",
    )
