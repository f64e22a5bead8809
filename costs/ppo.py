"""PPO, RLOO and GRPO: phases and memory of the four roles in each layout (PPO.md).

separate      policy, ref, reward and value are four models
shared_base   one base with three adapters: policy, reward and value; ref is the base with its adapter off
shared_trunk  the value model is a head on the policy's trunk: one forward and backward pass for both
RLOO and GRPO have no value model; their baseline is the mean of the other responses to the same prompt.
"""

from dataclasses import replace

from config.errors import CostError
from costs.compute import Work, forward_pass, micro_step, optimizer_step
from costs.generation import generation
from costs.memory import Moment, Parts, Roles, frozen_role, generating, optimizer_bytes, scoring, weights
from costs.setting import Levers, Rlhf, Setting
from costs.shapes import ModelShape
from costs.time import duration
from costs.timeline import training_moments

PhaseRow = tuple[str, Work, float, str]


def roles_of(setting: Setting) -> Rlhf:
    """The loop's shape. Raises CostError where it is missing or impossible."""
    loop = setting.rlhf
    if loop is None:
        raise CostError(f"stage {setting.stage} needs its roles (layout, reward, value). Set rlhf in the setting.")
    if loop.layout == "shared_base" and setting.levers.tuning != "lora":
        raise CostError(
            "ppo.layout=shared_base shares one frozen base between adapters: it needs LoRA. Set lora in params.yaml, or layout: separate."
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
    """(phase, work, seconds, bound) of rollout, score, reference, value, advantage and update over all updates, on one device."""
    loop = roles_of(setting)
    each = loop.batch / setting.data_parallel
    side_by_side = min(loop.rollout_batch, each)
    batches = setting.workload.steps * each / side_by_side
    generated = generation(setting, setting.model, setting.levers, batches, side_by_side)
    rollout = ("rollout", generated[0][1] + generated[1][1], generated[0][2] + generated[1][2], generated[1][3])
    passes = [_forward(setting, name, shape, vocabulary, each) for name, shape, vocabulary in _frozen_passes(setting)]
    return [rollout, *passes, _advantage(setting, each), _update(setting, each)]


def _frozen_passes(setting: Setting) -> list[tuple[str, ModelShape, bool]]:
    loop = roles_of(setting)
    passes: list[tuple[str, ModelShape, bool]] = [("score", loop.reward or setting.model, False)]
    if loop.ref:
        passes.append(("reference", setting.model, True))
    value = own_value(setting)
    if value is not None:
        passes.append(("value", value, False))
    return passes  # a head on the trunk says its values during the rollout


def _forward(setting: Setting, name: str, shape: ModelShape, vocabulary: bool, sequences: float) -> PhaseRow:
    """One pass over a rollout, micro-batch by micro-batch; log-probs only at response tokens."""
    micro = min(setting.levers.micro_batch, sequences)
    tokens = setting.workload.mean_tokens
    responses = micro * (setting.workload.mean_response_tokens or setting.workload.response_tokens)
    once = forward_pass(setting, shape, setting.levers, micro, tokens, responses if vocabulary else 0.0)
    times = setting.workload.steps * sequences / micro
    seconds = duration(once, setting)
    return (name, once.times(times), seconds.seconds * times, seconds.bound)


def _advantage(setting: Setting, sequences: float) -> PhaseRow:
    """Rewards and GAE: a backward loop over response positions, a handful of small operations each."""
    work = setting.workload
    once = Work(bytes_moved=sequences * work.response_tokens * 4 * 20, operations=6.0 * work.response_tokens)
    seconds = duration(once, setting)
    return ("advantage", once.times(work.steps), seconds.seconds * work.steps, seconds.bound)


def _update(setting: Setting, sequences: float) -> PhaseRow:
    """ppo_epochs over the rollout: policy and, in its own model, value."""
    loop, work, levers = roles_of(setting), setting.workload, setting.levers
    micro = update_micro_batch(setting)
    counted = replace(
        setting, workload=replace(work, loss_tokens=(work.mean_response_tokens or work.response_tokens) / max(1.0, work.mean_tokens))
    )
    passes = work.steps * loop.ppo_epochs * sequences / micro
    optimizer_steps = work.steps * loop.ppo_epochs * loop.mini_batches
    total, seconds, bound = Work(), 0.0, "compute"
    trained: list[tuple[ModelShape, Levers, bool]] = [(setting.model, levers, True)]
    value = own_value(setting)
    if value is not None:
        trained.append((value, value_levers(setting), False))
    for shape, held, vocabulary in trained:
        once, step = micro_step(counted, shape, held, micro, work.mean_tokens, vocabulary), optimizer_step(counted, shape, held)
        first, second = duration(once, setting), duration(step, setting)
        total = total + once.times(passes) + step.times(optimizer_steps)
        seconds += first.seconds * passes + second.seconds * optimizer_steps
        bound = first.bound if vocabulary else bound
    return ("update", total, seconds, bound)


# ---------------------------------------------------------------- memory


def ppo_moments(setting: Setting) -> list[Moment]:
    """Memory in each phase: every role's states stay, and the role at work has its activations."""
    loop, work = roles_of(setting), setting.workload
    resident = _resident(setting)
    side_by_side = min(loop.rollout_batch, loop.batch / setting.data_parallel)
    rollout = generating(
        setting, setting.model, setting.levers, side_by_side, work.prompt_tokens + work.response_tokens, work.prompt_tokens
    )
    found = [Moment("rollout", _plus(resident, "policy", rollout))]
    for name, shape, vocabulary in _frozen_passes(setting):
        role = {"score": "reward", "reference": "ref", "value": "value"}[name]
        found.append(
            Moment(
                name,
                _plus(resident, role, scoring(setting, shape, setting.levers, setting.levers.micro_batch, work.max_tokens, vocabulary)),
            )
        )
    return found + _update_moments(setting, resident)


def _resident(setting: Setting) -> Roles:
    """States that stay on the device through all phases."""
    loop, levers, shape = roles_of(setting), setting.levers, setting.model
    roles: Roles = {"policy": _states(setting, shape, levers)}
    if loop.layout == "shared_base":
        base = frozen_role(setting, shape, levers)["weights"]
        for role in ("reward", "value") if has_value(setting) else ("reward",):
            own = weights(setting, shape, levers) - base
            roles[role] = {"weights": own} | ({"optimizer": optimizer_bytes(setting, shape, levers)} if role == "value" else {})
        return roles
    if loop.ref and levers.tuning != "lora":
        roles["ref"] = frozen_role(setting, shape, levers)
    roles["reward"] = frozen_role(setting, loop.reward or shape, levers)
    value = own_value(setting)
    if value is not None:
        roles["value"] = _states(setting, value, value_levers(setting))
    return roles


def _states(setting: Setting, shape: ModelShape, levers: Levers) -> Parts:
    return {"weights": weights(setting, shape, levers), "optimizer": optimizer_bytes(setting, shape, levers)}


def update_micro_batch(setting: Setting) -> int:
    """Sequences of one forward and backward pass: no more than a mini-batch has."""
    loop = roles_of(setting)
    return max(1, min(setting.levers.micro_batch, int(loop.batch / setting.data_parallel / loop.mini_batches)))


def _update_moments(setting: Setting, resident: Roles) -> list[Moment]:
    """Training: the passes of policy and value model over a micro-batch end in one loss, so both keep their activations until then.

    The value model's forward pass comes last, so its backward pass comes first, and its activations go first.
    """
    micro = update_micro_batch(setting)
    counted = setting.with_levers(micro_batch=micro, accumulation=max(1, _mini_batch(setting) // micro))
    loss_tokens = (setting.workload.mean_response_tokens or setting.workload.response_tokens) / max(1.0, setting.workload.mean_tokens)
    counted = replace(counted, workload=replace(setting.workload, loss_tokens=min(1.0, loss_tokens)))
    policy = _work_parts(training_moments(counted, setting.model, counted.levers, phase="update"), "policy")
    value = own_value(setting)
    if value is None:
        return [Moment(phase, _plus(resident, "policy", parts)) for phase, parts in policy.items()]
    held = replace(value_levers(setting), micro_batch=micro, accumulation=counted.levers.accumulation)
    of_value = _work_parts(training_moments(counted, value, held, phase="update", role="value", vocabulary=False), "value")
    kept = {part: policy["update:loss"].get(part, 0.0) for part in ("activations",)}
    gradients = {"gradients": of_value["update:step"].get("gradients", 0.0)}
    waiting = {"gradients": policy["update:step"].get("gradients", 0.0) if counted.levers.accumulation > 1 else 0.0}
    found = [Moment(phase, _plus(_plus(resident, "value", parts), "policy", kept | waiting)) for phase, parts in of_value.items()]
    return found + [Moment(phase, _plus(_plus(resident, "policy", parts), "value", gradients)) for phase, parts in policy.items()]


def _mini_batch(setting: Setting) -> int:
    loop = roles_of(setting)
    return max(1, int(loop.batch / setting.data_parallel / loop.mini_batches))


def _work_parts(moments: list[Moment], role: str) -> dict[str, Parts]:
    """Phase -> the parts of a role that are there beside its states."""
    return {m.phase: {part: size for part, size in m.roles[role].items() if part not in ("weights", "optimizer")} for m in moments}


def _plus(roles: Roles, role: str, parts: Parts) -> Roles:
    """`roles` with further parts in one of them; a role without states of its own (ref, adapter off) has these parts only."""
    return {**roles, role: {**roles.get(role, {}), **{part: size for part, size in parts.items() if size}}}
