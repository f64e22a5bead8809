"""The plan of a retrain cycle: a run, and the cycle's own two processes. Before the run the data is examined against
the champion's (training/retraining/examine.py); after it champion and new model answer the same held-out prompts, and
the safety prompts where there are any (training/retraining/contest.py).

Each is one process on one device: the examination a data stage and a reward model's look at pairs, the contest an
evaluation of each side.
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
from costs.planning.data_stage import fixed_stage, plan_data
from costs.planning.models import base_shape
from costs.planning.moments import moments
from costs.planning.phases import held_out_phase, start_phase
from costs.planning.plans import PhasePlan, Plan, StagePlan, lasting
from costs.planning.rows import Rows, count, source_rows
from costs.planning.settings import answering, held_out_prompts, setting_of
from costs.planning.stages import plan_stage, planned
from costs.planning.target import Target
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
    target, rows = _alone(params, target), count(params, target.root)
    champion, note = _champions(params, target.root)
    pairs, counted = _new_pairs(rows, target.root)
    devices = (target.hardware, 1, target.price, target.rented)
    data = plan_data(rows, params.data.test_fraction, *devices)
    texts = rows.sft + rows.sft_held_out + rows.preference + rows.preference_held_out
    both = 2 * (texts + rows.prompts / (1 - params.data.test_fraction))
    parts = [
        replace(data, phases=tuple(phase for phase in data.phases if phase.phase in ("start", "read", "tokenise"))),
        fixed_stage(EXAMINE, {"compare": both * COMPARE_SECONDS}, both, *devices, ""),
    ]
    if champion.trained_reward is not None and pairs:
        reward = setting_of(champion, target, "reward", rows, base_shape(champion, target.root))
        judge = replace(reward, workload=replace(reward.workload, steps=0.0, held_out=2 * pairs)).with_levers(
            tuning="frozen", weights_fp32=False, quantisation=champion.model.quantisation
        )
        judging = [start_phase(judge), *(phase._replace(name="score") for phase in held_out_phase(judge))]
        held = [replace(moment, phase="score") for moment in moments(judge) if moment.phase == "evaluate"]
        parts.append(planned(judge, target.price, judging, held, find_lever=False))
    return _together(EXAMINE, parts, (f"examine: {counted}", f"examine: {note}"))


def plan_contest(params: Params, target: Target) -> StagePlan:
    """The plan of the contest that `rlhf retrain` holds after the run of `params`: both sides answer, and their
    replies are read and scored by either's models.

    Raises CostError as the plan of a stage does, for the champion's model too.
    """
    target, rows = _alone(params, target), count(params, target.root)
    champion, note = _champions(params, target.root)
    prompts, notes = [held_out_prompts(params, rows)], tuple[str, ...]()
    if params.retrain.safety_source is not None:
        counted, notes = source_rows(params.retrain.safety_source, target.root, "retrain.safety_source")
        prompts.append(max(1, round(counted["prompts"])))
    sides = [
        replace(
            answering("contest", side, target, rows, base_shape(side, target.root), number, 1), rented=target.rented
        )
        for side in (champion, params)
        for number in prompts
    ]
    reason = f"contest: {' and '.join(map(str, prompts))} prompts of each model"
    parts = [plan_stage(replace(side, rented=target.rented), target.price, find_lever=False) for side in sides]
    return _together(CONTEST, parts, (reason, f"contest: {note}", *notes))


def _together(stage: str, parts: Sequence[StagePlan], assumptions: tuple[str, ...]) -> StagePlan:
    """One process that does one part after the other; it starts once, and the largest part decides its memory."""
    phases: dict[str, PhasePlan] = {}
    for phase in (phase for part in parts for phase in part.phases):
        before = phases.get(phase.phase, phase)
        if before is phase or phase.phase == "start":
            phases[phase.phase] = max(before, phase, key=lambda phase: phase.seconds)
        else:
            phases[phase.phase] = replace(
                before,
                flops=before.flops + phase.flops,
                bytes_moved=before.bytes_moved + phase.bytes_moved,
                seconds=before.seconds + phase.seconds,
                usd=before.usd + phase.usd,
                peak_bytes=max(before.peak_bytes, phase.peak_bytes),
            )
    largest = max(parts, key=lambda part: part.peak_bytes_per_gpu)
    whole = lasting(largest, sum(phase.seconds for phase in phases.values()))
    lever = "" if whole.fits else "a lower evaluate.batch_size, or a device with more memory"
    return replace(whole, stage=stage, phases=tuple(phases.values()), lever=lever, assumptions=assumptions)


def _alone(params: Params, target: Target) -> Target:
    """One device for a process of the cycle itself; paid for are those of the machine."""
    rented = rented_devices(params) if target.by_stage else target.gpus
    return replace(target, gpus=1, rented=rented, by_stage=False)


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
