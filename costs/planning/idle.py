"""Devices that are rented together and wait while a stage of the run uses fewer of them."""

from collections.abc import Sequence

from costs.planning.plans import StagePlan
from costs.tables.catalogue import Price


def idle_device_seconds(used: Sequence[tuple[int, float]]) -> float:
    """Seconds x devices that are paid and not used, of stages that run one after the other on one
    machine: sum over stages of (most devices of any stage - its devices) x its seconds.

    used: (devices, seconds) of each stage.
    """
    most = max((devices for devices, _ in used), default=0)
    return sum((most - devices) * seconds for devices, seconds in used)


def idle_note(stages: Sequence[StagePlan], price: Price) -> tuple[str, ...]:
    """One line where devices of this machine wait, none where all stages use as many.

    stages: those that run beside the pipeline.
    """
    idle = idle_device_seconds([(stage.gpus, stage.seconds) for stage in stages])
    if not idle:
        return ()
    most = max(stage.gpus for stage in stages)
    fewer = [f"{stage.stage} ({stage.gpus})" for stage in stages if stage.gpus < most]
    return (
        f"{most} devices are rented together: those that wait while {', '.join(fewer)} run take "
        f"{idle / 3600:.3g} device-hours, {idle / 3600 * price.expected:.4g} USD, in no stage's "
        "cost; place them on a pool of their own with where.STAGE.pool",
    )
