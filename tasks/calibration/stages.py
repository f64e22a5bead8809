"""Times this machine: every stage of a run, from its data to its evaluation, for a few steps each in a folder of its
own, and each phase beside its plan.

Training takes as many rows as its steps do, of all lengths up to the longest, so that the short run needs the time of
a step and the memory of the whole one.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import yaml

from config import jsonl
from config.atomic_file import write_atomically
from config.compose import compose
from config.errors import EXIT_DONE, EnvironmentFault, StageStopped
from config.load import validate, write
from config.methods.registry import OFFLINE_METHODS, SAMPLING_METHODS, stage_module
from config.records import LOOPS, TimedRow, UsageRow
from config.schema import Params
from config.sections.where import LOCAL, SHARED_STAGES
from config.workspace.machine import MACHINE_FILE, Machine
from config.workspace.timed import TIMED_FILE, this_machine
from costs.formulas.setting import Setting
from costs.planning.data_stage import data_phases
from costs.planning.machine import device, held
from costs.planning.models import base_shape
from costs.planning.phases import formula_phases, units_of
from costs.planning.rows import count
from costs.planning.settings import evaluated, runs_a_model, setting_of
from costs.planning.target import find_target
from costs.tables.catalogue import hardware
from tasks.calibration.other_load import OtherLoad
from tasks.run.stop import StopRequest
from tasks.run.workspace import HOME, link_inputs
from tasks.stage.process import last_line, run_process

LEAST = {True: 2, False: 3}
"""Updates of a loop, and steps of a supervised stage; the first quarter warms up."""
SECONDS = 3.0
"""Planned time of the steps to run: a stage with short steps runs more of them."""
ONCE = ("start", "save", "evaluate")
"""Phases that do not grow with the steps."""
HELD_OUT = 4
"""Micro-batches of held-out rows that a supervised stage reads."""
STEPPED = ("train", "rollout", "update", "score", "generate", "reference", "value")
"""Phases that steps consist of, most of them."""
NEVER = 1_000_000
Say = Callable[[str], None]
Timed = Callable[..., TimedRow]
"""Makes a row of this calibration from what a phase took."""


def calibrate(root: Path, params: Params, say: Say, stop: StopRequest) -> list[TimedRow]:
    """Time the stages of `params` in the project at `root`: the machine's rates go to .rlhf/hardware.yaml, what the
    stages took to .rlhf/timed.jsonl.

    Raises EnvironmentFault if a stage fails or other programs keep the machine busy, StageStopped if it was asked to
    stop; the files are then as they were.
    """
    began, short, others = time.perf_counter(), params, OtherLoad()
    (root / MACHINE_FILE).parent.mkdir(exist_ok=True)

    def tell(part: str) -> None:
        say(f"{time.perf_counter() - began:5.1f} s  {part}")

    with tempfile.TemporaryDirectory(dir=root / MACHINE_FILE.parent) as place:
        folder = Path(place)
        tell("matrix products and memory")
        _run(folder, ["training.calibrate.machine", "rates.json"], "the measurement", stop)
        rates = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
        for name in ("metrics", "plots", "models", "data"):
            (folder / name).mkdir()
        write(params, folder / "params.yaml")
        link_inputs(root, folder, params)
        machine = Machine(**rates, date=datetime.now(UTC).date().isoformat(), seconds=0.0)
        timed: Timed = partial(
            TimedRow, time=time.time(), run_id="", machine=this_machine(), hardware=device(machine).name
        )
        rows = []
        for stage in params.stages:
            tell(f"{stage}: {_what(short, stage)}")
            module = "training.process.launch" if stage in SHARED_STAGES else stage_module(stage)
            _run(folder, [module, stage], f"a short {stage} stage", stop)
            if stage == "data":
                rows += timed_data(folder, params, timed)
                short = shortened(params, steps_of(root, folder, params, machine))
                write(short, folder / "params.yaml")
                cut_rows(folder, short)
            elif runs_a_model(params, stage):
                rows += timed_stage(root, folder, short, stage, machine, timed)
    others.check(machine.threads)
    machine = machine.model_copy(update={"seconds": time.perf_counter() - began})
    tell("done")
    content = yaml.safe_dump(machine.model_dump(mode="json"), sort_keys=False, width=100)
    write_atomically(
        root / MACHINE_FILE,
        "# Written by rlhf calibrate: this machine, for rlhf plan. Delete it to plan with "
        f"costs/tables/hardware.yaml again.\n{content}",
    )
    for row in rows:
        jsonl.append(root / TIMED_FILE, row)
    return rows


def _what(params: Params, stage: str) -> str:
    if not runs_a_model(params, stage):
        return "all rows"
    if stage == "evaluate":
        return f"{params.evaluate.prompts} prompts"
    steps = params.section(stage)
    return f"{steps.updates} updates" if stage in LOOPS else f"{steps.max_steps} steps"


def steps_of(root: Path, folder: Path, params: Params, machine: Machine) -> dict[str, int]:
    """Steps of each stage that runs a model: as many as take SECONDS by the formulas, at least LEAST and at most all
    of them. Of an evaluation, batches of all models.
    """
    by_stage = {}
    for stage in (name for name in params.stages if runs_a_model(params, name)):
        setting = _setting(root, folder, params, stage, machine)
        step_seconds = sum(phase.seconds for phase in formula_phases(setting) if phase.name in STEPPED)
        steps = setting.workload.steps
        least = 1 if stage == "evaluate" else LEAST[stage in LOOPS]
        by_stage[stage] = min(ceil(steps), max(least, round(SECONDS * steps / max(step_seconds, 1e-9))))
    return by_stage


def shortened(params: Params, steps: Mapping[str, int]) -> Params:
    """The same run with so many steps of each stage, on this machine."""
    overlay = dict[str, Any]()
    for stage, number in steps.items():
        if stage == "evaluate":
            evaluate, batches = params.evaluate, ceil(number / evaluated(params))
            overlay[stage] = {"prompts": min(evaluate.prompts, batches * evaluate.batch_size)}
        elif stage in LOOPS:
            overlay[stage] = {"updates": number, "checkpoint_every_updates": NEVER, "sample_every_updates": NEVER}
        else:
            overlay[stage] = {"max_steps": number, "checkpoint_every_steps": NEVER}
        if stage == "distill":
            overlay[stage]["sft_updates"] = 0  # so that every update is of one kind
        elif stage in SAMPLING_METHODS:
            overlay[stage] |= {"target_kl": None, "max_kl": None}
    content = params.model_dump(mode="json")
    for place in content["where"].values():
        if place is not None:
            place["pool"] = LOCAL
    return validate(compose(content, overlay), "the params of a calibration")


def _run(folder: Path, arguments: Sequence[str], what: str, stop: StopRequest) -> None:
    """Run a module to its end."""
    path = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", *arguments]
    ended = run_process(command, folder, folder / "log.txt", stop, variables=variables)
    if stop.requested:
        raise StageStopped(f"asked to stop: {MACHINE_FILE} is unchanged.")
    if ended.code != EXIT_DONE:
        raise EnvironmentFault(
            f"{what} fails on this machine, so it cannot be measured: {last_line(ended.output)} "
            f"{MACHINE_FILE} is unchanged. Try rlhf doctor."
        )


# ---------------------------------------------------------------- rows


def usage(folder: Path, stage: str) -> list[UsageRow]:
    """Usage rows of a stage by step."""
    return list(jsonl.read(folder / "runs" / stage / "usage.jsonl", UsageRow).rows)


def write_lock(folder: Path, params: Params) -> None:
    """Record in dvc.lock the params that made the data of `folder`, as DVC would, so that the planner counts their
    rows.
    """
    made_with = {"data": params.data.model_dump(mode="json")}
    lock = {"stages": {"data": {"params": {"params.yaml": made_with}}}}
    (folder / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")


def cut_rows(folder: Path, params: Params) -> None:
    """Keep as many prepared rows as the short stages read: evenly spaced by their length, the longest among them."""
    method, metrics = params.align.method, folder / "metrics" / "data.json"
    most = {
        stage: section.batch_size * (section.updates if stage in LOOPS else section.max_steps)
        for stage in params.stages
        if stage != "evaluate" and runs_a_model(params, stage)
        for section in (params.section(stage),)
    }
    read = {
        "sft": (most["sft"], HELD_OUT * params.sft.micro_batch_size),
        "preference": (
            max(most.get("reward", 0), most[method] if method in OFFLINE_METHODS else 0),
            HELD_OUT * (params.trained_reward or params.sft).micro_batch_size,
        ),
        "ratings": (most[method], HELD_OUT * params.sft.micro_batch_size),
        "prompts": (max([1, *(rows for stage, rows in most.items() if stage in LOOPS)]), params.evaluate.prompts),
    }
    counted = json.loads(metrics.read_text(encoding="utf-8"))
    for dataset, sizes in read.items():
        for split, most in zip(("train", "test"), sizes, strict=True):
            path = folder / "data" / "prepared" / dataset / f"{split}.jsonl"
            lines = path.read_bytes().splitlines(keepends=True)
            kept = evenly(lines, most)
            path.write_bytes(b"".join(lines[place] for place in kept))
            keep_rows(path.with_suffix(".arrow"), kept)
            counted[f"{dataset}_{split}_rows"] = len(kept)
    metrics.write_text(json.dumps(counted), encoding="utf-8")
    write_lock(folder, params)


def keep_rows(path: Path, places: Sequence[int]) -> None:
    """Keep these rows of a file of token ids (training/preparation/tokens.py)."""
    with pyarrow.OSFile(str(path), "rb") as file:
        table = pyarrow.ipc.open_file(file).read_all().take(pyarrow.array(places, pyarrow.int64()))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table.combine_chunks())


def evenly(lines: Sequence[bytes], most: int) -> list[int]:
    """Places of at most `most` of the lines, evenly spaced by length, the longest among them, in their order."""
    order = sorted(range(len(lines)), key=lambda place: len(lines[place]))
    kept = min(most, len(lines))
    return sorted(order[(i + 1) * len(lines) // kept - 1] for i in range(kept))


# ---------------------------------------------------------------- times


def _setting(root: Path, folder: Path, params: Params, stage: str, machine: Machine) -> Setting:
    target = replace(find_target(params, None, 1, None, root), hardware=device(machine), by_stage=True)
    target, rows = replace(target, root=folder), count(params, folder)
    return setting_of(params, target, stage, rows, base_shape(params, root))


def timed_data(folder: Path, params: Params, timed: Timed) -> list[TimedRow]:
    """The data stage, which is run to its end."""
    write_lock(folder, params)
    rows = usage(folder, "data")
    _, units = data_phases(count(params, folder), params.data.test_fraction, hardware("cpu"))
    seconds = {phase: sum(row.seconds for row in rows if row.phase == phase) for phase in units}
    return [
        timed(
            stage="data", held="", micro_batch=1.0, phase=phase,
            units=units[phase], seconds=seconds[phase], peak_bytes=0.0,
        )
        for phase in units
    ]  # fmt: skip


def timed_stage(
    root: Path, folder: Path, params: Params, stage: str, machine: Machine, timed: Timed
) -> list[TimedRow]:
    """A stage that ran in `folder`. The first quarter of its steps warms up."""
    rows = usage(folder, stage)
    setting = as_long(_setting(root, folder, params, stage, machine), rows)
    warm, steps = max(1.0, max(row.step for row in rows) / 4), setting.workload.steps
    timed_rows = []
    for phase in [phase.name for phase in formula_phases(setting)]:
        phase_rows = [row for row in rows if row.phase == phase]
        if not phase_rows:
            continue
        seconds = sum(row.seconds for row in phase_rows)
        if stage != "evaluate" and phase not in ONCE:
            # as many steps as were planned: rows that are too long may have left fewer
            usual = [row for row in phase_rows if row.step > warm] or phase_rows
            seconds = steps * sum(row.seconds for row in usual) / len({row.step for row in usual})
        timed_rows.append(
            timed(
                stage=stage, held=held(setting), micro_batch=setting.levers.micro_batch, phase=phase,
                units=units_of(setting, phase), seconds=seconds,
                peak_bytes=max(row.peak_bytes for row in phase_rows),
            )
        )  # fmt: skip
    return timed_rows


def as_long(setting: Setting, rows: Sequence[UsageRow]) -> Setting:
    """The setting with responses as long as those that were sampled: a model that has hardly learnt does not end them
    as the demonstrations do.
    """
    sampled = [row for row in rows if row.phase in ("rollout", "generate") and row.sequences]
    if not sampled or not setting.workload.mean_response_tokens:
        return setting
    work = setting.workload
    prompt = work.mean_tokens - work.mean_response_tokens
    mean = sum(row.tokens for row in sampled) / sum(row.sequences for row in sampled)
    response = min(max(1.0, mean - prompt), 1.0 * work.response_tokens)
    return replace(
        setting, workload=replace(work, mean_tokens=prompt + response, mean_response_tokens=response, decoded_tokens=0)
    )
