"""The plan of a retrain cycle's contest: the champion and the new model answer the same held-out
prompts, and the safety prompts where there are any (training/retraining/contest.py).

One process on one device, beside the pipeline; one model is in memory at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from config.champions import champion_folder, read_record
from config.errors import ParamsError
from config.load import read
from config.schema import Params
from config.sections.model import Model
from costs.formulas.compute import Work
from costs.formulas.setting import Setting
from costs.planning.planner import Target, answering, base_shape, held_out_prompts
from costs.planning.plans import StagePlan
from costs.planning.rows import Rows, count, source_rows
from costs.planning.stages import (
    DISK_BYTES_PER_SECOND,
    Phase,
    moments,
    phases,
    planned,
    process_seconds,
)

CONTEST = "contest"
"""Its name beside the stages in a plan."""


def plan_contest(params: Params, aim: Target) -> StagePlan:
    """The plan of the contest that `rlhf retrain` holds after the run of `params`.

    Raises CostError as the plan of a stage does, for the champion's model too.
    """
    aim = replace(aim, gpus=1, by_stage=False)
    rows = count(params, aim.root)
    champion, note = _champions(params, aim.root)
    asked: list[tuple[int, tuple[str, ...]]] = [(held_out_prompts(params, rows), ())]
    if params.retrain.safety_source is not None:
        found, notes = source_rows(params.retrain.safety_source, aim.root, "retrain.safety_source")
        asked.append((max(1, round(found["prompts"])), notes))
    sides = [_side(own, rows, aim, prompts) for prompts, _ in asked for own in (champion, params)]
    made = planned(
        replace(
            sides[1],
            workload=replace(sides[1].workload, steps=sum(side.workload.steps for side in sides)),
        ),
        aim.price,
        _together(sides),
        [moment for side in sides for moment in moments(side)],
        find_lever=False,
    )
    words = tuple(line for _, notes in asked for line in notes)
    said = f"contest: {' and '.join(str(prompts) for prompts, _ in asked)} prompts of each model"
    return replace(made, assumptions=(said, note, *words), lever=_lever(made))


def _lever(made: StagePlan) -> str:
    return "" if made.fits else "a lower evaluate.batch_size, or a device with more memory"


def _champions(params: Params, root: Path) -> tuple[Params, str]:
    """`params` with the champion's model, and what was assumed of it."""
    champion = read_record(root).champion
    if champion is None:
        return params, "contest: there is no champion yet, one of the same shape is assumed"
    try:
        content = read(champion_folder(root, champion.run_id) / "params.yaml")
        model = Model.model_validate(content["model"])
    except (ParamsError, KeyError, ValueError):
        return params, (
            f"contest: the params of the champion {champion.run_id} can not be read, its shape is "
            "assumed to be the new model's"
        )
    return params.model_copy(update={"model": model}), f"contest: against {champion.run_id}"


def _side(params: Params, rows: Rows, aim: Target, prompts: int) -> Setting:
    """What one model takes part with: it answers once, and two reward models read that."""
    return answering(CONTEST, params, aim, rows, base_shape(params, aim.root), prompts, 1)


def _together(sides: Sequence[Setting]) -> list[Phase]:
    """The phases of all sides, one after the other in one process."""
    own = process_seconds(sides[0])
    found: dict[str, Phase] = {"start": Phase("start", Work(), own, "fixed")}
    for side in sides:
        for phase in phases(side):
            seconds = phase.seconds - (process_seconds(side) if phase.name == "start" else 0.0)
            before = found.get(phase.name)
            found[phase.name] = (
                phase._replace(seconds=seconds)
                if before is None
                else before._replace(
                    work=before.work + phase.work, seconds=before.seconds + seconds
                )
            )
        again = side.model.parameters * side.levers.dtype_bytes  # the SFT model, after the policy
        start = found["start"]
        found["start"] = start._replace(
            work=start.work + Work(bytes_moved=again),
            seconds=start.seconds + again / DISK_BYTES_PER_SECOND,
        )
    return list(found.values())
