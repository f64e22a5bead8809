"""Memory of every stage: the moments at which it can be highest."""

from dataclasses import replace

from config.methods.registry import OFFLINE_METHODS, SAMPLING_METHODS
from costs.formulas.distillation import distill_moments
from costs.formulas.generation import generation_moment
from costs.formulas.memory import Moment, frozen_role, scoring, with_process
from costs.formulas.ppo import packed_sequences
from costs.formulas.ppo_memory import ppo_moments
from costs.formulas.setting import TRAINER_STAGES, Setting
from costs.formulas.sharding import sharding_of
from costs.formulas.states import (
    Parts,
    gathered_bytes,
    gradient_width,
    optimizer_bytes,
    role_weights,
    trained_parameters,
    weights,
)
from costs.formulas.timeline import loading_moment, training_moments
from costs.planning.machine import with_measured
from costs.tables.shapes import ModelShape

READ_AT_ONCE = 2
"""Sequences that reward, dpo and kto read at once where nothing is learnt, in those of a training pass: four
micro-batches of pairs' longer sides, two of rated replies (training/reward.py, dpo.py, kto.py).
"""


def moments(setting: Setting) -> list[Moment]:
    """Every moment at which the stage's memory can be at its highest; on a CPU with what the process holds besides
    tensors, and where the stage was timed with what it held beyond these.
    """
    return with_measured(setting, formula_moments(setting))


def formula_moments(setting: Setting) -> list[Moment]:
    """The moments as the formulas have them."""
    moments = tensor_moments(setting)
    if not setting.hardware.is_cpu:
        return moments
    return with_process(setting, [*moments, *saving_moments(setting)])


def saving_moments(setting: Setting) -> list[Moment]:
    """The first process of a divided Trainer stage on a CPU while it writes the model: what learns is gathered, and
    safetensors makes the bytes of all of it before it writes any. On an accelerator both lie in the host's memory.
    """
    shape, levers = setting.model, setting.levers
    if not sharding_of(setting).fsdp2 or setting.stage not in TRAINER_STAGES:
        return []
    written = trained_parameters(shape, levers) * gradient_width(setting, levers)
    held = {
        "weights": role_weights(setting, shape, levers),
        "optimizer": optimizer_bytes(setting, shape, levers),
        "workspace": 2 * written,
    }
    return [Moment("save", {"policy": held})]


def tensor_moments(setting: Setting) -> list[Moment]:
    """Tensors at every moment."""
    if setting.stage in SAMPLING_METHODS:
        return ppo_moments(setting)
    if setting.stage == "distill":
        return distill_moments(setting)
    if setting.stage not in ("evaluate", "contest", "serve"):
        return trainer_moments(setting)
    generating = generation_moment(setting, setting.model, setting.levers)
    if setting.stage == "serve":
        return [generating]
    return [replace(generating, phase="generate"), *judging_moments(setting)]


def trainer_moments(setting: Setting) -> list[Moment]:
    """Moments of a stage that trains on given rows, including the reference model if it has one."""
    shape, levers, pairs = setting.model, setting.levers, setting.workload.reference_sequences
    moments = [
        *training_moments(setting, shape, levers, vocabulary=setting.stage != "reward"),
        *held_out_moments(setting),
    ]
    if setting.stage in OFFLINE_METHODS and pairs is not None:
        # before the model is divided
        unsharded = setting.with_levers(parallel="ddp", offload_weights=False)
        frozen = {"weights": weights(unsharded, shape, unsharded.levers)}
        moments.append(Moment("reference", {"policy": frozen | read_at_once(unsharded, pairs)}))
    # with LoRA the reference is the policy with its adapter off
    elif setting.stage in OFFLINE_METHODS and levers.tuning != "lora":
        moments = beside_frozen(setting, moments, shape, "ref")
    return [*moments, loading_moment(setting, shape, levers)]


def beside_frozen(setting: Setting, moments: list[Moment], other: ModelShape, role: str) -> list[Moment]:
    """The moments of training with a frozen model in memory all the while, and its own passes."""
    levers = setting.levers
    frozen = frozen_role(setting, other, levers)
    passing = scoring(setting, other, levers, levers.micro_batch, setting.workload.max_tokens, vocabulary=True)
    states = {part: size for part, size in moments[-1].roles["policy"].items() if part in ("weights", "optimizer")}
    return [
        *(replace(moment, roles=moment.roles | {role: frozen}) for moment in moments),
        Moment("reference", {"policy": states, role: frozen | passing}),
    ]


def read_at_once(setting: Setting, available: float) -> Parts:
    """Memory of a pass without gradients over held-out pairs, besides the weights."""
    rows = min(READ_AT_ONCE * setting.levers.micro_batch, available)
    passing = scoring(
        setting, setting.model, setting.levers, rows, setting.workload.max_tokens, vocabulary=setting.stage != "reward"
    )
    return passing | {"workspace": passing["workspace"] + gathered_bytes(setting, setting.model, setting.levers)}


def held_out_moments(setting: Setting) -> list[Moment]:
    """Reading the held-out pairs after the last step, with the optimizer still there; a Trainer's own evaluation takes
    less than its training.
    """
    if setting.stage not in ("reward", *OFFLINE_METHODS) or not setting.workload.held_out or not setting.engine.packs:
        return []
    held = {
        "weights": role_weights(setting, setting.model, setting.levers),
        "optimizer": optimizer_bytes(setting, setting.model, setting.levers),
    }
    return [Moment("evaluate", {"policy": held | read_at_once(setting, setting.workload.held_out)})]


def judging_moments(setting: Setting) -> list[Moment]:
    """Scoring of replies by a reward model, then their log-probs under the SFT model, while the model that sampled
    them stays loaded.
    """
    if setting.rlhf is None:
        return []
    shape, levers, judge, longest = (setting.model, setting.levers, setting.rlhf.reward, setting.workload.max_tokens)
    replies = max(1.0, setting.workload.steps / setting.rlhf.evaluated * levers.micro_batch)
    rows = packed_sequences(setting, replies)
    policy = frozen_role(setting, shape, levers)

    def reading(role: str, read: ModelShape, vocabulary: bool) -> Moment:
        other = frozen_role(setting, read, levers) | scoring(setting, read, levers, rows, longest, vocabulary)
        return Moment("score", {"policy": policy, role: other})

    scored = [reading("reward", judge, False)] if judge is not None else []
    return [*scored, reading("ref", shape, True)]
