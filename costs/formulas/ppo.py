"""The loop of PPO, RLOO and GRPO: phases and memory of the four roles in each layout.

separate      policy, ref, reward and value are four models; with LoRA ref is on the policy's base
shared_base   one base with adapters for policy, reward and value; ref is on it too
shared_trunk  the value model is a head on the policy's trunk: one forward and backward pass for
              both
RLOO and GRPO are the same loop, always `separate`, without a value model. On a base that it shares, ref is the base
alone, or where the SFT model is an adapter, that one, which learns no more.
"""

from dataclasses import replace
from math import ceil, floor, sqrt

from config.errors import CostError
from costs.formulas.compute import Work, forward_pass, gather, micro_step, optimizer_step
from costs.formulas.generation import generation
from costs.formulas.setting import Levers, Rlhf, Setting
from costs.formulas.time import duration
from costs.tables.shapes import ModelShape

PhaseRow = tuple[str, Work, float, str]


def roles_of(setting: Setting) -> Rlhf:
    """The loop's shape. Raises CostError where it is missing or impossible."""
    loop = setting.rlhf
    if loop is None:
        raise CostError(f"stage {setting.stage} needs its roles (layout, reward, value). Set rlhf in the setting.")
    if loop.layout == "shared_base" and setting.levers.tuning != "lora":
        raise CostError(
            "ppo.layout=shared_base shares one frozen base between adapters: it needs LoRA. Set "
            "lora in params.yaml, or layout: separate."
        )
    return loop


def has_value(setting: Setting) -> bool:
    return setting.stage == "ppo"


def own_value(setting: Setting) -> ModelShape | None:
    """The shape of a value model that is separate from the policy, else None."""
    loop = roles_of(setting)
    return (loop.value or setting.model) if has_value(setting) and loop.layout != "shared_trunk" else None


def value_levers(setting: Setting) -> Levers:
    return roles_of(setting).value_levers or setting.levers


# ---------------------------------------------------------------- time


def ppo_phases(setting: Setting) -> list[PhaseRow]:
    """(phase, work, seconds, bound) of rollout, score, reference, value, advantage and update over all updates, on one
    device.
    """
    loop = roles_of(setting)
    sequences = loop.batch / setting.gpus
    side_by_side = min(loop.rollout_batch, sequences)
    batches = setting.workload.steps * sequences / side_by_side
    generated = generation(setting, setting.model, setting.levers, batches, side_by_side)
    rollout = (
        "rollout",
        generated[0][1]
        + generated[1][1]
        + gather(setting, setting.model, setting.levers).times(setting.workload.steps),
        generated[0][2] + generated[1][2] + gather_seconds(setting, setting.model) * setting.workload.steps,
        generated[1][3],
    )
    again = loop.rescored / setting.gpus
    rescored = [scored(setting, "logprobs", setting.model, True, again)] if again else []
    passes = [
        scored(setting, name, shape, vocabulary, sequences) for name, shape, vocabulary in frozen_passes(setting)
    ]
    return [rollout, *rescored, *passes, _advantage(setting, sequences), update_phase(setting, sequences)]


def frozen_passes(setting: Setting) -> list[tuple[str, ModelShape, bool]]:
    loop = roles_of(setting)
    passes: list[tuple[str, ModelShape, bool]] = []
    if loop.reward is not None:
        passes.append(("score", loop.reward, False))
    if loop.ref:
        passes.append(("reference", setting.model, True))
    value = own_value(setting)
    if value is not None:
        passes.append(("value", value, False))
    return passes  # a head on the trunk computes values during the rollout


def scored(setting: Setting, name: str, shape: ModelShape, vocabulary: bool, sequences: float) -> PhaseRow:
    """One pass over a rollout, micro-batch by micro-batch; log-probs only at response tokens, a score at one token of
    each sequence.
    """
    work = setting.workload
    passes, micro = passes_over(setting, sequences)
    tokens = _tokens_in(setting, name == "score")
    counted = replace(
        setting,
        workload=replace(work, read_tokens=min(1.0, (1.0 if name == "score" else work.response_mean) / tokens)),
    )
    read = tokens if setting.engine.whole_logits else work.response_mean
    once = forward_pass(counted, shape, setting.levers, micro, tokens, micro * read if vocabulary else 0.0)
    times = work.steps * passes
    seconds = duration(once, setting)
    gathered = gather(setting, shape, setting.levers).times(work.steps)
    return (
        name,
        once.times(times) + gathered,
        seconds.seconds * times + gather_seconds(setting, shape) * work.steps,
        seconds.bound,
    )


def gather_seconds(setting: Setting, shape: ModelShape) -> float:
    """Seconds to gather a sharded role for a phase: nothing is computed meanwhile."""
    once = gather(setting, shape, setting.levers)
    return duration(once, setting).seconds if once.communicated_bytes else 0.0


def passes_over(setting: Setting, sequences: float) -> tuple[float, float]:
    """(passes, sequences of each) over `sequences` of them: as many as the budget of tokens asks for, or micro-batches
    padded to one size.
    """
    if not setting.engine.packs:
        micro = min(setting.levers.micro_batch, sequences)
        return sequences / micro, micro
    passes = max(1, ceil(sequences * setting.workload.mean_tokens / setting.micro_batch_tokens - 1e-9))
    # a sequence longer than the budget is a micro-batch of its own
    passes = min(passes, max(1, ceil(sequences)))
    return 1.0 * passes, sequences / passes


def update_passes(setting: Setting, mini_batch: float) -> tuple[float, float]:
    """(passes, sequences of each) over a mini-batch."""
    micro = 1.0 * update_micro_batch(setting)
    return passes_over(setting, mini_batch) if setting.engine.packs else (mini_batch / micro, micro)


def _tokens_in(setting: Setting, every_token: bool) -> float:
    """Mean tokens of a sequence that go through a model: the last one predicts nothing, and is read for a score
    alone.
    """
    mean = setting.workload.mean_tokens
    return mean if every_token or not setting.engine.packs else max(1.0, mean - 1)


def _advantage(setting: Setting, sequences: float) -> PhaseRow:
    """Rewards and GAE: a backward loop over response positions, a dozen small operations each
    (training/rl/ppo_math.py).
    """
    work = setting.workload
    once = Work(bytes_moved=sequences * work.response_tokens * 4 * 20, operations=13.0 * work.response_tokens)
    seconds = duration(once, setting)
    return ("advantage", once.times(work.steps), seconds.seconds * work.steps, seconds.bound)


def update_phase(setting: Setting, sequences: float) -> PhaseRow:
    """ppo_epochs over the rollout: policy and, in its own model, value."""
    loop, work, levers = roles_of(setting), setting.workload, setting.levers
    packs = setting.engine.packs
    micro_batches, micro = update_passes(setting, sequences / loop.mini_batches)
    tokens = _tokens_in(setting, every_token=False)
    read = min(1.0, work.response_mean / tokens)
    counted = replace(
        setting,
        workload=replace(
            work, loss_tokens=1.0 if setting.engine.whole_logits else read, read_tokens=read if packs else 1.0
        ),
    )
    passes = work.steps * loop.ppo_epochs * loop.mini_batches * micro_batches
    optimizer_steps = work.steps * loop.ppo_epochs * loop.mini_batches
    total, seconds, bound = Work(), 0.0, "compute"
    trained: list[tuple[ModelShape, Levers, bool]] = [(setting.model, levers, True)]
    value = own_value(setting)
    if value is not None:
        trained.append((value, value_levers(setting), False))
    for shape, held, vocabulary in trained:
        once, step = (
            micro_step(counted, shape, held, micro, tokens, vocabulary),
            optimizer_step(counted, shape, held),
        )
        first, second = duration(once, setting), duration(step, setting)
        total = total + once.times(passes) + step.times(optimizer_steps)
        seconds += first.seconds * passes + second.seconds * optimizer_steps
        bound = first.bound if vocabulary else bound
    return ("update", total, seconds, bound)


def update_micro_batch(setting: Setting) -> int:
    """Sequences of one forward and backward pass: no more than a mini-batch has."""
    return min(setting.levers.micro_batch, mini_batch(setting))


def mini_batch(setting: Setting) -> int:
    """Responses between two optimizer steps, of one device."""
    loop = roles_of(setting)
    return max(1, floor(loop.batch / setting.gpus / loop.mini_batches))


def packed_sequences(setting: Setting, available: float) -> float:
    """Sequences of the longest kind that one pass over `available` ones comes to: its budget of tokens, or where all
    fit into it what their lengths add up to. Responses are taken as exponential, and the sum three standard deviations
    above its mean.
    """
    if not setting.engine.packs:
        return min(1.0 * setting.levers.micro_batch, available)
    work = setting.workload
    tokens = available * work.mean_tokens + 3 * sqrt(available) * work.mean_response_tokens
    tokens = min(setting.micro_batch_tokens, tokens)
    return max(1.0, min(tokens / work.max_tokens, available))
