"""The phases of every stage: which work is done how often, and what is in memory meanwhile.

One function per kind of stage makes its phases and its memory moments; `plan_stage` turns them into
a StagePlan.
"""

from dataclasses import asdict, replace
from typing import NamedTuple

from config.errors import CostError
from config.records import SAMPLING_METHODS
from costs.formulas.compute import Work, forward_pass, gather, micro_step, optimizer_step
from costs.formulas.counts import mfu
from costs.formulas.generation import generation, generation_moment
from costs.formulas.memory import (
    Moment,
    Parts,
    device_bytes,
    frozen_role,
    gathered_bytes,
    gradient_width,
    optimizer_bytes,
    peak,
    role_weights,
    scoring,
    trained_parameters,
    weights,
)
from costs.formulas.ppo import ppo_moments, ppo_phases
from costs.formulas.process_heap import TRAINER_STAGES, with_process
from costs.formulas.setting import Setting
from costs.formulas.sharding import sharding_of
from costs.formulas.time import Seconds, duration, energy_kwh
from costs.formulas.timeline import loading_moment, training_moments
from costs.planning.plans import PhasePlan, StagePlan, Usd
from costs.tables.catalogue import Price
from costs.tables.shapes import ModelShape

DISK_BYTES_PER_SECOND = 1.0e9
"""Reading or writing weights: a common local SSD."""
TOKENISE_SECONDS = 2.6e-6
"""Reading, tokenising and batching one token of text: 0.9 s for 9,600 demonstrations of 36 tokens
on one core.
"""


class Phase(NamedTuple):
    """A phase over the whole stage, on one device."""

    name: str
    work: Work
    seconds: float
    bound: str


TRAINING_STAGES = ("sft", "pretrain", "reward", "dpo", "distill")


def phases(setting: Setting) -> list[Phase]:
    """Every phase of the stage with its work and time."""
    match setting.stage:
        case "sft" | "pretrain" | "reward" | "dpo" | "distill":
            middle = [train_phase(setting), *forward_phases(setting), *held_out_phase(setting)]
        case stage if stage in SAMPLING_METHODS:
            middle = [Phase(*phase) for phase in ppo_phases(setting)]
        case "evaluate" | "contest":
            middle = [_generate_phase(setting), *forward_phases(setting)]
        case "serve":
            middle = [Phase(*phase) for phase in generation(setting, setting.model, setting.levers)]
        case _:
            raise CostError(
                f"stage {setting.stage!r} has no plan. Known: {', '.join(STAGES)}. Add its phases "
                "to costs/planning/stages.py."
            )
    return [start_phase(setting), *middle, save_phase(setting)]


STAGES = (*TRAINING_STAGES, *SAMPLING_METHODS, "evaluate", "contest", "serve")


def moments(setting: Setting) -> list[Moment]:
    """Every moment at which the stage's memory can be at its highest; on a CPU with what the
    process holds besides tensors.
    """
    found = tensor_moments(setting)
    if not setting.hardware.is_cpu:
        return found
    return with_process(setting, [*found, *saving_moments(setting)])


def saving_moments(setting: Setting) -> list[Moment]:
    """The first process of a divided Trainer stage on a CPU while it writes the model: what learns
    is gathered whole, and safetensors makes the bytes of all of it before it writes any. On an
    accelerator both lie in the host's memory.
    """
    shape, levers = setting.model, setting.levers
    if not sharding_of(setting).fsdp2 or setting.stage not in TRAINING_STAGES:
        return []
    written = trained_parameters(shape, levers) * gradient_width(setting, levers)
    held = {
        "weights": role_weights(setting, shape, levers),
        "optimizer": optimizer_bytes(setting, shape, levers),
        "workspace": 2 * written,
    }
    return [Moment("save", {"policy": held})]


def tensor_moments(setting: Setting) -> list[Moment]:
    """Every moment's tensors."""
    shape, levers = setting.model, setting.levers
    if setting.stage in SAMPLING_METHODS:
        return ppo_moments(setting)
    if setting.stage == "evaluate":
        return [
            replace(generation_moment(setting, shape, levers), phase="generate"),
            *judging_moments(setting),
        ]
    if setting.stage == "contest":
        return [
            replace(generation_moment(setting, shape, levers), phase="generate"),
            *one_at_a_time(setting),
        ]
    if setting.stage == "examine":
        return [Moment("score", {"reward": read_alone(setting, shape, levers.micro_batch, False)})]
    if setting.stage == "serve":
        return [generation_moment(setting, shape, levers)]
    vocabulary = setting.stage != "reward"
    found = [
        *training_moments(setting, shape, levers, vocabulary=vocabulary),
        *held_out_moments(setting),
    ]
    if setting.stage == "dpo" and setting.workload.reference_sequences is not None:
        # before the model is divided
        whole = setting.with_levers(parallel="ddp", offload_weights=False)
        frozen = {"weights": weights(whole, shape, whole.levers)}
        found.append(
            Moment(
                "reference",
                {"policy": frozen | read_at_once(whole, setting.workload.reference_sequences)},
            )
        )
    elif setting.stage in ("dpo", "distill"):
        other, role = (shape, "ref") if setting.stage == "dpo" else (_teacher(setting), "teacher")
        if not (
            setting.stage == "dpo" and levers.tuning == "lora"
        ):  # with LoRA the reference is the policy with its adapter off
            frozen = frozen_role(setting, other, levers)
            found = [replace(moment, roles=moment.roles | {role: frozen}) for moment in found]
            passing = scoring(
                setting,
                other,
                levers,
                levers.micro_batch,
                setting.workload.max_tokens,
                vocabulary=True,
            )
            states = {
                part: size
                for part, size in found[-1].roles["policy"].items()
                if part in ("weights", "optimizer")
            }
            found.append(Moment("reference", {"policy": states, role: frozen | passing}))
    return [*found, loading_moment(setting, shape, levers)]


READ_AT_ONCE = 2
"""Sequences that reward and dpo read at once where nothing is learnt, in those of a training pass:
four micro-batches of pairs' longer sides (training/reward.py, training/dpo.py).
"""


def read_at_once(setting: Setting, available: float) -> Parts:
    """What a pass without gradients over held-out pairs holds besides the weights."""
    rows = min(READ_AT_ONCE * setting.levers.micro_batch, available)
    passing = scoring(
        setting,
        setting.model,
        setting.levers,
        rows,
        setting.workload.max_tokens,
        vocabulary=setting.stage != "reward",
    )
    return passing | {
        "workspace": passing["workspace"] + gathered_bytes(setting, setting.model, setting.levers)
    }


def held_out_moments(setting: Setting) -> list[Moment]:
    """Reading the held-out pairs after the last step, with the optimizer still there; a Trainer's
    own evaluation takes less than its training.
    """
    if (
        setting.stage not in ("reward", "dpo")
        or not setting.workload.held_out
        or not setting.engine.packs
    ):
        return []
    held = {
        "weights": role_weights(setting, setting.model, setting.levers),
        "optimizer": optimizer_bytes(setting, setting.model, setting.levers),
    }
    return [Moment("evaluate", {"policy": held | read_at_once(setting, setting.workload.held_out)})]


def _teacher(setting: Setting) -> ModelShape:
    if setting.rlhf is None or setting.rlhf.teacher is None:
        raise CostError("stage distill needs a teacher's shape. Set rlhf.teacher in the setting.")
    return setting.rlhf.teacher


def judging_moments(setting: Setting) -> list[Moment]:
    """Scoring of replies by a reward model, then their log-probs under the SFT model, while the
    model that said them stays loaded.
    """
    if setting.rlhf is None or setting.rlhf.reward is None:
        return []
    shape, levers, judge, longest = (
        setting.model,
        setting.levers,
        setting.rlhf.reward,
        setting.workload.max_tokens,
    )
    replies = max(1.0, setting.workload.steps / EVALUATED * levers.micro_batch)
    rows = max(1.0, min(setting.micro_batch_tokens / longest, replies))
    policy = frozen_role(setting, shape, levers)

    def reading(role: str, read: ModelShape, vocabulary: bool) -> Moment:
        other = frozen_role(setting, read, levers) | scoring(
            setting, read, levers, rows, longest, vocabulary
        )
        return Moment("score", {"policy": policy, role: other})

    return [reading("reward", judge, False), reading("ref", shape, True)]


def one_at_a_time(setting: Setting) -> list[Moment]:
    """Log-probs of replies under policy or SFT model, and their scores, each model alone in
    memory (training/retraining/trained_models.py).
    """
    shape, levers, longest = setting.model, setting.levers, setting.workload.max_tokens
    judge = setting.rlhf.reward if setting.rlhf and setting.rlhf.reward else shape
    replies = max(1.0, setting.workload.steps * levers.micro_batch)
    read = max(1.0, min(setting.micro_batch_tokens / longest, replies))
    context = setting.micro_batch_tokens / levers.micro_batch
    scored = max(1.0, min(SCORED_AT_ONCE * context / longest, replies))
    return [
        Moment("score", {role: read_alone(setting, model, rows, role == "policy")})
        for role, model, rows in (("policy", shape, read), ("reward", judge, scored))
    ]


def read_alone(setting: Setting, shape: ModelShape, rows: float, vocabulary: bool) -> Parts:
    """A frozen model that reads so many sequences at once, with nothing beside it."""
    return frozen_role(setting, shape, setting.levers) | scoring(
        setting, shape, setting.levers, rows, setting.workload.max_tokens, vocabulary
    )


SCORED_AT_ONCE = 200
"""Contexts full of tokens that the processes of a retrain cycle score at once."""

EVALUATED = 3
"""Models that an evaluation asks: base, SFT and aligned."""


# ---------------------------------------------------------------- phases


def start_phase(setting: Setting) -> Phase:
    """Imports, and reading the weights of every role from disk."""
    loaded = setting.model.parameters * setting.levers.dtype_bytes
    if setting.rlhf:
        loaded += sum(
            role.parameters * setting.levers.dtype_bytes
            for role in (setting.rlhf.reward, setting.rlhf.value, setting.rlhf.teacher)
            if role
        )
    reading = setting.workload.texts_tokens * TOKENISE_SECONDS
    return Phase(
        "start",
        Work(bytes_moved=loaded),
        process_seconds(setting) + reading + loaded / DISK_BYTES_PER_SECOND,
        "fixed",
    )


def process_seconds(setting: Setting) -> float:
    """What starting the stage's process takes: imports, most of it."""
    own = setting.hardware.measured
    kind = "sft" if setting.stage in TRAINER_STAGES else "ppo"
    return own.machine.stages[kind].start_seconds if own else setting.engine.start_seconds


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
    last = duration(
        _micro(setting) + optimizer_step(setting, setting.model, setting.levers), setting
    )
    own = setting.hardware.measured.trainer_step_seconds if setting.hardware.measured else 0.0
    return Seconds(
        (setting.levers.accumulation - 1) * micro.seconds + last.seconds + own, micro.bound
    )


def _micro(setting: Setting) -> Work:
    return micro_step(
        setting,
        setting.model,
        setting.levers,
        setting.levers.micro_batch,
        setting.workload.mean_tokens,
        setting.stage != "reward",
    )


def train_phase(setting: Setting) -> Phase:
    """Forward, backward and optimizer over all steps."""
    step = _micro(setting).times(setting.levers.accumulation) + optimizer_step(
        setting, setting.model, setting.levers
    )
    seconds = step_seconds(setting)
    return Phase(
        "train",
        step.times(setting.workload.steps),
        seconds.seconds * setting.workload.steps,
        seconds.bound,
    )


def held_out_phase(setting: Setting) -> list[Phase]:
    """One pass over the held-out rows after training. Each process of a Trainer reads all of them;
    pairs are shared, by a model that is gathered once.
    """
    work, levers = setting.workload, setting.levers
    if not work.held_out:
        return []
    read = levers.micro_batch * work.mean_tokens * work.loss_tokens
    vocabulary = read if setting.stage != "reward" else 0.0
    once = forward_pass(
        setting, setting.model, levers, levers.micro_batch, work.mean_tokens, vocabulary
    )
    own = setting.engine.name == "ours"
    shared = 1 if own and setting.stage == "sft" else setting.data_parallel
    times = work.held_out / levers.micro_batch / shared
    whole, gathers = gather(setting, setting.model, levers), 1.0
    if setting.stage == "sft" and not sharding_of(setting).keeps_weights:
        gathers = times
    seconds = duration(once, setting)
    waiting = duration(whole, setting).seconds if whole.communicated_bytes else 0.0
    return [
        Phase(
            "evaluate",
            once.times(times) + whole.times(gathers),
            seconds.seconds * times + waiting * gathers,
            seconds.bound,
        )
    ]


def _generate_phase(setting: Setting) -> Phase:
    """Prefill and decode as one phase, as the stage measures it."""
    (_, prefill, first, _), (_, decode, rest, bound) = generation(
        setting, setting.model, setting.levers
    )
    return Phase("generate", prefill + decode, first + rest, bound)


def forward_phases(setting: Setting) -> list[Phase]:
    """Passes of frozen roles: the reference of DPO, the teacher of distillation, the judge of an
    evaluation.
    """
    shape, name = {
        "dpo": (setting.model, "reference"),
        "distill": (setting.rlhf.teacher if setting.rlhf else None, "teacher"),
        **dict.fromkeys(
            ("evaluate", "contest"), (setting.rlhf.reward if setting.rlhf else None, "score")
        ),
    }.get(setting.stage, (None, ""))
    if shape is None:
        return []
    levers, work = setting.levers, setting.workload
    read = levers.micro_batch * work.mean_tokens * work.loss_tokens
    vocabulary = 0.0 if name == "score" else read
    once = forward_pass(setting, shape, levers, levers.micro_batch, work.mean_tokens, vocabulary)
    if (
        name == "score"
        # and the log-probabilities of the replies under their own and under the SFT model, whose
        # own are both
    ):
        contest = setting.stage == "contest"  # both sides' replies, by one side's reward model
        once = once.times(2 if contest else 1) + forward_pass(
            setting,
            setting.model,
            levers,
            levers.micro_batch,
            work.mean_tokens,
            levers.micro_batch * work.mean_response_tokens,
        ).times(2 if contest else 2 - 1 / EVALUATED)
    times = work.steps * levers.accumulation
    if setting.stage == "dpo" and work.reference_sequences is not None:
        times = work.reference_sequences / levers.micro_batch / setting.data_parallel
    seconds = duration(once, setting)
    return [Phase(name, once.times(times), seconds.seconds * times, seconds.bound)]


# ---------------------------------------------------------------- the plan


def plan_stage(setting: Setting, price: Price, find_lever: bool = True) -> StagePlan:
    """The plan of one stage at a price per device-hour. Raises CostError for a stage that has no
    formulas.
    """
    return planned(setting, price, phases(setting), moments(setting), find_lever)


def planned(
    setting: Setting, price: Price, found: list[Phase], held: list[Moment], find_lever: bool = True
) -> StagePlan:
    """The plan of a stage whose phases and moments of memory are known."""
    highest = peak(held)
    needed = device_bytes(setting, highest.total)
    seconds = sum(phase.seconds for phase in found)
    gpu_hours = seconds * setting.gpus / 3600
    shortfall = max(0.0, needed - setting.hardware.usable_bytes)
    rate = price.expected / 3600 * setting.gpus
    tokens = processed_tokens(setting)
    return StagePlan(
        stage=setting.stage,
        hardware=setting.hardware.name,
        gpus=setting.gpus,
        fits=shortfall == 0,
        shortfall_bytes=shortfall,
        lever=closing_lever(setting) if shortfall and find_lever else "",
        peak_bytes_per_gpu=highest.total,
        device_bytes_per_gpu=needed,
        peak_phase=highest.phase,
        memory=highest.roles,
        phases=tuple(
            PhasePlan(
                p.name,
                p.work.flops * setting.gpus,
                p.work.total_bytes * setting.gpus,
                p.seconds,
                p.bound,
                p.seconds * rate,
                phase_peak(held, p.name),
            )
            for p in found
        ),
        seconds=seconds,
        gpu_hours=gpu_hours,
        kwh=energy_kwh(gpu_hours, setting.hardware.watts),
        usd=Usd(gpu_hours * price.low, gpu_hours * price.expected, gpu_hours * price.high),
        steps=setting.workload.steps,
        tokens=tokens,
        mfu=mfu(
            setting.model,
            tokens / seconds / setting.gpus,
            setting.workload.mean_tokens,
            setting.hardware.peak(setting.levers.dtype),
        )
        if seconds
        else 0.0,
        levers=asdict(setting.levers),
        assumptions=setting.assumptions,
    )


def phase_peak(held: list[Moment], phase: str) -> float:
    """Highest memory of the moments that belong to a phase, 0 where none is modelled."""
    return max(
        (moment.total for moment in held if moment.phase.split(":")[0] == phase), default=0.0
    )


def processed_tokens(setting: Setting) -> float:
    """Tokens that the policy is trained on, or generates, over the whole stage and all devices."""
    levers, work = setting.levers, setting.workload
    if setting.stage in SAMPLING_METHODS and setting.rlhf:
        return work.steps * setting.rlhf.batch * work.mean_tokens
    return (
        work.steps
        * levers.micro_batch
        * levers.accumulation
        * setting.data_parallel
        * work.mean_tokens
    )


FITTING_LEVERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("activation_checkpointing: true", {"checkpointing": "full"}),
    ("micro_batch_size: 1", {"micro_batch": 1}),
    (
        "micro_batch_size: 1 and activation_checkpointing: true",
        {"micro_batch": 1, "checkpointing": "full"},
    ),
    ("an 8-bit optimizer", {"optimizer": "adamw8bit", "checkpointing": "full"}),
    ("FSDP over the devices", {"parallel": "fsdp", "checkpointing": "full"}),
    ("LoRA", {"tuning": "lora", "weights_fp32": False, "checkpointing": "full"}),
    (
        "LoRA with micro_batch_size: 1",
        {"tuning": "lora", "weights_fp32": False, "checkpointing": "full", "micro_batch": 1},
    ),
    (
        "QLoRA with micro_batch_size: 1",
        {
            "tuning": "lora",
            "weights_fp32": False,
            "quantisation": "nf4-dq",
            "checkpointing": "full",
            "micro_batch": 1,
        },
    ),
    (
        "QLoRA over FSDP",
        {
            "tuning": "lora",
            "weights_fp32": False,
            "quantisation": "nf4-dq",
            "checkpointing": "full",
            "micro_batch": 1,
            "parallel": "fsdp",
        },
    ),
)
"""Tried in this order: what costs least time and changes the training least comes first."""


def closing_lever(setting: Setting) -> str:
    """The first lever that makes the stage fit, or how much the stage needs at least."""
    smallest = float("inf")
    for name, changes in FITTING_LEVERS:
        if changes.get("parallel") == "fsdp" and setting.gpus == 1:
            continue
        micro = changes.get("micro_batch", setting.levers.micro_batch)
        accumulation = setting.levers.accumulation * setting.levers.micro_batch // int(str(micro))
        needed = device_bytes(
            setting,
            peak(moments(setting.with_levers(**changes, accumulation=max(1, accumulation)))).total,
        )
        if needed <= setting.hardware.usable_bytes:
            return name
        smallest = min(smallest, needed)
    return (
        f"nothing tried fits: it needs at least {smallest / 2**30:.1f} GiB a device; take a larger "
        "device or more of them"
    )
