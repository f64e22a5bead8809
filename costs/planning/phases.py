"""The phases of every stage: their work, repetitions and time."""

from typing import NamedTuple

from config.errors import CostError
from config.methods.registry import OFFLINE_METHODS, SAMPLING_METHODS
from config.records import LOOPS
from config.work import HELD_OUT, ONCE, PHASE_UNITS, TOKENS, TRAINED
from costs.formulas.compute import Work, forward_pass, gather, micro_step, optimizer_step
from costs.formulas.distillation import distill_phases
from costs.formulas.generation import generation
from costs.formulas.ppo import ppo_phases
from costs.formulas.setting import EVALUATED, TRAINER_STAGES, Setting
from costs.formulas.sharding import sharding_of
from costs.formulas.time import Seconds, duration
from costs.planning.machine import timed_seconds, timings
from costs.tables.catalogue import Hardware

STAGES = (*TRAINER_STAGES, *LOOPS, "evaluate", "contest", "serve")
DISK_BYTES_PER_SECOND = 1.0e9
"""Reading or writing weights: a common local SSD."""


class Phase(NamedTuple):
    """A phase over the stage, on one device."""

    name: str
    work: Work
    seconds: float
    bound: str


def phases(setting: Setting) -> list[Phase]:
    """Every phase of the stage with its work and time: as it was timed where the stage was, else by the formulas."""
    planned = formula_phases(setting)
    seconds = timed_seconds(timings(setting), {phase.name: units_of(setting, phase.name) for phase in planned})
    return [phase._replace(seconds=seconds.get(phase.name, phase.seconds)) for phase in planned]


def units_of(setting: Setting, phase: str) -> float:
    """What a phase does over the stage, in its unit (config/work.py)."""
    work, unit = setting.workload, PHASE_UNITS.get(phase, TOKENS)
    if unit == HELD_OUT:
        return work.held_out * work.mean_tokens
    if phase == "reference" and work.reference_sequences is not None:
        return work.reference_sequences * work.mean_tokens
    passes = setting.rlhf.ppo_epochs if setting.rlhf and unit == TRAINED else 1
    return 1.0 if unit == ONCE else passes * processed_tokens(setting)


def processed_tokens(setting: Setting) -> float:
    """Tokens that the policy is trained on, or generates, over the stage and all devices."""
    levers, work = setting.levers, setting.workload
    if setting.stage in LOOPS and setting.rlhf:
        return work.steps * setting.rlhf.batch * work.mean_tokens
    return work.steps * levers.micro_batch * levers.accumulation * setting.gpus * work.mean_tokens


def formula_phases(setting: Setting) -> list[Phase]:
    """The phases as the formulas have them."""
    match setting.stage:
        case stage if stage in TRAINER_STAGES:
            middle = [train_phase(setting), *forward_phases(setting), *held_out_phase(setting)]
        case stage if stage in SAMPLING_METHODS:
            middle = [Phase(*phase) for phase in ppo_phases(setting)]
            middle[2:2] = function_phase(setting, setting.workload.steps * _batch(setting))
        case "distill":
            middle = [Phase(*phase) for phase in distill_phases(setting)]
        case "evaluate" | "contest":
            middle = [_generate_phase(setting), *forward_phases(setting)]
        case "serve":
            middle = [Phase(*phase) for phase in generation(setting, setting.model, setting.levers)]
        case _:
            raise CostError(
                f"stage {setting.stage!r} has no plan. Known: {', '.join(STAGES)}. Add its phases "
                "to costs/planning/phases.py."
            )
    return [start_phase(setting), *middle, save_phase(setting)]


def start_phase(setting: Setting) -> Phase:
    """Imports, and reading the weights of every role from disk."""
    loaded = setting.model.parameters * setting.levers.dtype_bytes
    if setting.rlhf:
        loaded += sum(
            role.parameters * setting.levers.dtype_bytes
            for role in (setting.rlhf.reward, setting.rlhf.value, setting.rlhf.teacher)
            if role
        )
    return Phase(
        "start", Work(bytes_moved=loaded), process_seconds(setting.hardware) + loaded / DISK_BYTES_PER_SECOND, "fixed"
    )


def process_seconds(device: Hardware) -> float:
    """Time to start the stage's process, mostly imports.

    Source: 3.2 to 5.2 s in the demo's stages on two cores of an EPYC (28 November 2026); 11 to 24 s with CUDA on an
    H200 (docs/gpu.md).
    """
    return 4.0 if device.is_cpu else 17.0


def save_phase(setting: Setting) -> Phase:
    """Writing the trained weights once."""
    saved = (
        0.0
        if setting.stage in ("evaluate", "contest", "serve")
        else setting.model.parameters * setting.levers.weight_bytes
    )
    return Phase("save", Work(bytes_moved=saved), saved / DISK_BYTES_PER_SECOND, "fixed")


def step_seconds(setting: Setting) -> Seconds:
    """Seconds of one optimizer step with its accumulation."""
    micro = duration(_micro(setting), setting)
    # gradients are reduced during the pass
    last = duration(_micro(setting) + optimizer_step(setting, setting.model, setting.levers), setting)
    return Seconds((setting.levers.accumulation - 1) * micro.seconds + last.seconds, micro.bound)


def _micro(setting: Setting) -> Work:
    model, levers, tokens = setting.model, setting.levers, setting.workload.mean_tokens
    step = micro_step(setting, model, levers, levers.micro_batch, tokens, setting.stage != "reward")
    if setting.stage == "kto":  # as many replies to other prompts are read first
        read = levers.micro_batch * tokens * setting.workload.loss_tokens
        step += forward_pass(setting, model, levers, levers.micro_batch, tokens, read)
    return step


def train_phase(setting: Setting) -> Phase:
    """Forward, backward and optimizer over all steps."""
    step = _micro(setting).times(setting.levers.accumulation) + optimizer_step(setting, setting.model, setting.levers)
    seconds = step_seconds(setting)
    return Phase("train", step.times(setting.workload.steps), seconds.seconds * setting.workload.steps, seconds.bound)


def held_out_phase(setting: Setting) -> list[Phase]:
    """One pass over the held-out rows after training. Each process of a Trainer reads all of them; pairs are shared,
    by a model that is gathered once.
    """
    work, levers = setting.workload, setting.levers
    if not work.held_out:
        return []
    read = levers.micro_batch * work.mean_tokens * work.loss_tokens
    vocabulary = read if setting.stage != "reward" else 0.0
    once = forward_pass(setting, setting.model, levers, levers.micro_batch, work.mean_tokens, vocabulary)
    is_ours = setting.engine.name == "ours"
    shared = 1 if is_ours and setting.stage == "sft" else setting.gpus
    times = work.held_out / levers.micro_batch / shared
    gathering, gathers = gather(setting, setting.model, levers), 1.0
    if setting.stage == "sft" and not sharding_of(setting).keeps_weights:
        gathers = times
    seconds = duration(once, setting)
    waiting = duration(gathering, setting).seconds if gathering.communicated_bytes else 0.0
    return [
        Phase(
            "evaluate",
            once.times(times) + gathering.times(gathers),
            seconds.seconds * times + waiting * gathers,
            seconds.bound,
        )
    ]


def _generate_phase(setting: Setting) -> Phase:
    """Prefill and decode as one phase, as the stage measures it."""
    (_, prefill, first, _), (_, decode, rest, bound) = generation(setting, setting.model, setting.levers)
    return Phase("generate", prefill + decode, first + rest, bound)


def _batch(setting: Setting) -> int:
    return setting.rlhf.batch if setting.rlhf else 0


def function_phase(setting: Setting, replies: float) -> list[Phase]:
    """The reward function on the replies of the stage, if one takes the reward model's place."""
    seconds = setting.rlhf.function_seconds * replies if setting.rlhf else 0.0
    return [Phase("score", Work(), seconds, "fixed")] if seconds else []


def forward_phases(setting: Setting) -> list[Phase]:
    """Passes of frozen roles: the reference of DPO and KTO, the judge of an evaluation."""
    shape, name = {
        **dict.fromkeys(OFFLINE_METHODS, (setting.model, "reference")),
        **dict.fromkeys(("evaluate", "contest"), (setting.rlhf.reward if setting.rlhf else None, "score")),
    }.get(setting.stage, (None, ""))
    if not name:
        return []
    levers, work = setting.levers, setting.workload
    read = levers.micro_batch * work.mean_tokens * work.loss_tokens
    vocabulary = 0.0 if name == "score" else read
    once = Work()
    if shape is not None:
        once = forward_pass(setting, shape, levers, levers.micro_batch, work.mean_tokens, vocabulary)
    if name == "score":
        # and the log-probabilities of the replies under their own and under the SFT model, whose own are both
        models = setting.rlhf.evaluated if setting.rlhf else EVALUATED
        contest = setting.stage == "contest"  # both sides' replies, by one side's reward model
        once = once.times(2 if contest else 1) + forward_pass(
            setting,
            setting.model,
            levers,
            levers.micro_batch,
            work.mean_tokens,
            levers.micro_batch * work.mean_response_tokens,
        ).times(2 if contest else 2 - 1 / models)
    times = work.steps * levers.accumulation
    if setting.stage in OFFLINE_METHODS and work.reference_sequences is not None:
        times = work.reference_sequences / levers.micro_batch / setting.gpus
    seconds = duration(once, setting)
    function = sum(phase.seconds for phase in function_phase(setting, times * levers.micro_batch))
    return [Phase(name, once.times(times), seconds.seconds * times + function, seconds.bound)]
