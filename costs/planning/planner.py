"""params.yaml -> StagePlans, one for each stage of the pipeline."""

from collections.abc import Sequence

from config.errors import CostError
from config.records import STAGES
from config.schema import Params
from config.sections.where import LOCAL
from costs.planning.data_stage import plan_data
from costs.planning.judge import with_judge
from costs.planning.models import base_shape
from costs.planning.plans import Plan, StagePlan
from costs.planning.reward_function import plan_function
from costs.planning.rows import Rows, count
from costs.planning.settings import runs_a_model, setting_of
from costs.planning.stages import plan_stage
from costs.planning.target import Target
from costs.tables.price import pool_of


def plan(params: Params, target: Target, stages: tuple[str, ...] = ()) -> Plan:
    """The plan of the named stages, by default of all stages of the run.

    Raises CostError for an unknown stage, device, price or architecture.
    """
    for stage in stages:
        if stage not in STAGES:
            raise CostError(f"--stage {stage} is not a stage. Known: {', '.join(STAGES)}.")
    rows, model = count(params, target.root), base_shape(params, target.root)
    planned, chosen = [], stages or params.stages
    for stage in chosen:
        stage_target = target.of(params, stage)
        if stage == "data":
            planned.append(
                plan_data(
                    rows,
                    params.data.test_fraction,
                    stage_target.hardware,
                    stage_target.gpus,
                    stage_target.price,
                    stage_target.rented,
                )
            )
        elif not runs_a_model(params, stage):
            place = (stage_target.hardware, stage_target.gpus, stage_target.price, stage_target.rented)
            planned.append(plan_function(params, target.root, *place))
        else:
            stage_plan = plan_stage(setting_of(params, target, stage, rows, model), stage_target.price)
            if stage == "evaluate":
                stage_plan = with_judge(stage_plan, params, target, rows)
            planned.append(stage_plan)
    targets = [target.of(params, stage) for stage in chosen]
    notes = [note for stage in chosen for note in target.pool_warnings(params, stage)]
    notes += [*idle_note(planned), *pool_costs(params, planned)]
    return Plan(tuple(planned), (*assumptions(targets, rows), *notes))


def assumptions(targets: Sequence[Target], rows: Rows) -> tuple[str, ...]:
    """Assumptions of the plan as a whole."""
    devices = {target.hardware.name: target.hardware for target in targets}.values()
    prices = dict.fromkeys(target.price for target in targets)
    return (
        *(f"{device.name}: {device.source}, read {device.date}" for device in devices),
        *(
            f"price {price.low:g} / {price.expected:g} / {price.high:g} USD per device-hour: "
            f"{price.source}, read {price.date}"
            for price in prices
        ),
        *(f"energy at board power, {device.watts:g} W a device, without host and cooling" for device in devices),
        "responses assumed as long as the demonstrations, and at most max_new_tokens",
        *rows.assumptions,
    )


def pool_costs(params: Params, stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """What each pool costs, a line each; none where every stage runs here."""
    by_pool: dict[str, list[StagePlan]] = {}
    for stage in stages:
        by_pool.setdefault(pool_of(params, stage.stage), []).append(stage)
    if set(by_pool) <= {LOCAL}:
        return ()
    return tuple(
        f"pool {pool}: {sum(stage.usd.expected for stage in placed):.4g} USD for "
        + ", ".join(f"{stage.stage} ({_devices(params, stage)})" for stage in placed)
        for pool, placed in by_pool.items()
    )


def _devices(params: Params, stage: StagePlan) -> str:
    nodes = params.where.of(stage.stage).nodes
    return f"{stage.gpus} {stage.hardware}" + (f" on {nodes} nodes" if nodes > 1 else "")


def idle_device_seconds(used: Sequence[tuple[int, int, float]]) -> float:
    """Device-seconds that are paid for but idle.

    used: (devices in use, devices paid for, seconds) of each stage.
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
