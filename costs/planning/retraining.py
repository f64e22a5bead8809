"""The plan of a retrain cycle: a run, and the cycle's own two processes. Before the run the data is examined against
the champion's (training/retraining/examine.py); after it champion and new model answer the same held-out prompts, and
the safety prompts where there are any (training/retraining/contest.py).

Each is one process on one device, with one model in memory at a time.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from config.errors import ParamsError
from config.load import read
from config.schema import Params
from config.sections.model import Model
from config.work import EXAMINED_PAIRS
from config.workspace.champions import champion_folder, read_record
from costs.formulas.compute import Work, forward_pass
from costs.formulas.setting import Levers, Setting, Workload
from costs.formulas.time import duration
from costs.planning.data_stage import data_seconds
from costs.planning.models import base_shape, reward_shape
from costs.planning.moments import SCORED_AT_ONCE, moments
from costs.planning.phases import DISK_BYTES_PER_SECOND, Phase, phases, process_seconds
from costs.planning.plans import Plan, StagePlan
from costs.planning.rows import Rows, count, source_rows
from costs.planning.settings import ATTENTION, answering, held_out_prompts
from costs.planning.stages import planned
from costs.planning.target import Target
from costs.tables.engines import engine
from costs.tables.price import rented_devices

EXAMINE, CONTEST = "examine", "contest"
"""Their stage names in a plan."""
COMPARE_SECONDS = 26e-6
"""Comparing a row of the data now or of the champion's with the other: 2.0 CPU seconds for 76,000 helpdesk rows on one
core of an AMD EPYC machine, two thirds of it tokenising prompts for their lengths.
"""


def plan_cycle(run: Plan, params: Params, target: Target, examined: bool = False) -> Plan:
    """The plan of a cycle around the plan of its run: the examination first, unless that is done.

    Raises CostError as the plan of a stage does, for the champion's model too.
    """
    before = () if examined else (plan_examination(params, target),)
    return Plan((*before, *run.stages, plan_contest(params, target)), run.assumptions)


def plan_examination(params: Params, target: Target) -> StagePlan:
    """The plan of looking at the data as it is now: reading it as the data stage does, comparing it with the
    champion's, and the champion's reward model on the pairs that came.
    """
    target = replace(target, gpus=1, rented=waiting(params, target), by_stage=False)
    rows = count(params, target.root)
    champion, note = _champions(params, target.root)
    pairs, counted = _new_pairs(rows, target.root)
    setting = _judging(champion, rows, target, pairs)
    data = data_seconds(rows, params.data.test_fraction, target.hardware)
    texts = rows.sft + rows.sft_held_out + rows.preference + rows.preference_held_out
    both = 2 * (texts + rows.prompts / (1 - params.data.test_fraction))
    loaded = setting.model.parameters * setting.levers.dtype_bytes
    started = process_seconds(setting) + loaded / DISK_BYTES_PER_SECOND
    once = forward_pass(setting, setting.model, setting.levers, setting.levers.micro_batch, rows.preference_tokens, 0)
    passes, seconds = setting.workload.steps, duration(once, setting)
    plan = planned(
        setting,
        target.price,
        [
            Phase("start", Work(bytes_moved=loaded), started, "fixed"),
            *(Phase(name, Work(), data[name], "fixed") for name in ("read", "tokenise")),
            Phase("compare", Work(), both * COMPARE_SECONDS, "fixed"),
            Phase("score", once.times(passes), seconds.seconds * passes, seconds.bound),
        ],
        moments(setting),
        find_lever=False,
    )
    lever = "" if plan.fits else "a device with more memory"
    return replace(plan, assumptions=(f"examine: {counted}", f"examine: {note}"), lever=lever)


def _new_pairs(rows: Rows, root: Path) -> tuple[float, str]:
    """Pairs that the champion's reward model is to judge, and how that was counted."""
    now = rows.preference + rows.preference_held_out
    champion, before = read_record(root).champion, 0.0
    if champion is not None:
        file = champion_folder(root, champion.run_id) / "metrics" / "data.json"
        try:
            metrics = json.loads(file.read_text(encoding="utf-8"))
            before = metrics["preference_train_rows"] + metrics["preference_test_rows"]
        except (OSError, ValueError, KeyError, TypeError):
            champion = None
    pairs = min(max(0.0, now - before), float(EXAMINED_PAIRS))
    reason = (
        "as many as there are more than the champion had"
        if champion
        else "all, as it is not known how many a champion had"
    )
    return pairs, f"{pairs:.0f} new pairs to judge ({reason}; at most {EXAMINED_PAIRS})"


def _judging(params: Params, rows: Rows, target: Target, pairs: float) -> Setting:
    """A reward model of the shape in `params` on both sides of `pairs`, one side after the other
    (training/inference/trained_models.py).
    """
    model, longest = params.model, min(rows.longest_preference, params.model.context_length)
    at_once = max(1, int(min(SCORED_AT_ONCE * model.context_length / longest, pairs)))
    levers = Levers(
        tuning="frozen",
        quantisation=model.quantisation,
        dtype=model.dtype,
        attention=ATTENTION[model.attention],
        micro_batch=at_once,
    )
    work = Workload(int(longest), min(rows.preference_tokens, longest), 2 * pairs / at_once)
    base = base_shape(params, target.root)
    shape = reward_shape(params, base) or base.scored
    return Setting(EXAMINE, shape, levers, work, target.hardware, engine("ours"), target.gpus, target.rented)


def waiting(params: Params, target: Target) -> int:
    """Devices that are paid for while a process of the cycle itself runs: those of the machine."""
    return rented_devices(params) if target.by_stage else target.gpus


def plan_contest(params: Params, target: Target) -> StagePlan:
    """The plan of the contest that `rlhf retrain` holds after the run of `params`.

    Raises CostError as the plan of a stage does, for the champion's model too.
    """
    target = replace(target, gpus=1, rented=waiting(params, target), by_stage=False)
    rows = count(params, target.root)
    champion, note = _champions(params, target.root)
    prompts: list[tuple[int, tuple[str, ...]]] = [(held_out_prompts(params, rows), ())]
    if params.retrain.safety_source is not None:
        counted, notes = source_rows(params.retrain.safety_source, target.root, "retrain.safety_source")
        prompts.append((max(1, round(counted["prompts"])), notes))
    sides = [_side(side, rows, target, prompts) for prompts, _ in prompts for side in (champion, params)]
    plan = planned(
        replace(
            sides[1],
            rented=target.rented,
            workload=replace(sides[1].workload, steps=sum(side.workload.steps for side in sides)),
        ),
        target.price,
        _together(sides),
        [moment for side in sides for moment in moments(side)],
        find_lever=False,
    )
    words = tuple(line for _, notes in prompts for line in notes)
    reason = f"contest: {' and '.join(str(prompts) for prompts, _ in prompts)} prompts of each model"
    return replace(plan, assumptions=(reason, f"contest: {note}", *words), lever=_lever(plan))


def _lever(plan: StagePlan) -> str:
    return "" if plan.fits else "a lower evaluate.batch_size, or a device with more memory"


def _champions(params: Params, root: Path) -> tuple[Params, str]:
    """`params` with the champion's model, and what was assumed of it."""
    champion = read_record(root).champion
    if champion is None:
        return params, "there is no champion yet, one of the same shape is assumed"
    try:
        content = read(champion_folder(root, champion.run_id) / "params.yaml")
        model = Model.model_validate(content["model"])
    except (ParamsError, KeyError, ValueError):
        return params, (
            f"the params of the champion {champion.run_id} cannot be read, its shape is assumed to be the new model's"
        )
    return params.model_copy(update={"model": model}), f"against {champion.run_id}"


def _side(params: Params, rows: Rows, target: Target, prompts: int) -> Setting:
    """Setting of one model in the contest, which answers once, for two reward models to read."""
    return answering(CONTEST, params, target, rows, base_shape(params, target.root), prompts, 1)


def _together(sides: Sequence[Setting]) -> list[Phase]:
    """The phases of all sides, one after the other in one process."""
    start_seconds = process_seconds(sides[0])
    by_name: dict[str, Phase] = {"start": Phase("start", Work(), start_seconds, "fixed")}
    for side in sides:
        for phase in phases(side):
            seconds = phase.seconds - (process_seconds(side) if phase.name == "start" else 0.0)
            before = by_name.get(phase.name)
            by_name[phase.name] = (
                phase._replace(seconds=seconds)
                if before is None
                else before._replace(work=before.work + phase.work, seconds=before.seconds + seconds)
            )
        again = side.model.parameters * side.levers.dtype_bytes  # the SFT model, after the policy
        start = by_name["start"]
        by_name["start"] = start._replace(
            work=start.work + Work(bytes_moved=again), seconds=start.seconds + again / DISK_BYTES_PER_SECOND
        )
    return list(by_name.values())
