"""The loop of PPO, RLOO and GRPO: memory of the four roles in each layout (costs/formulas/ppo.py)."""

from dataclasses import replace
from math import floor

from costs.formulas.memory import Moment, Roles, frozen_role, generating, scoring
from costs.formulas.ppo import (
    frozen_passes,
    has_value,
    mini_batch,
    own_value,
    packed_sequences,
    roles_of,
    update_micro_batch,
    update_passes,
    value_levers,
)
from costs.formulas.setting import Levers, Setting
from costs.formulas.states import Parts, gathered_bytes, optimizer_bytes, role_weights, waiting_gradients
from costs.formulas.timeline import training_moments
from costs.tables.shapes import ModelShape


def ppo_moments(setting: Setting) -> list[Moment]:
    """Memory in each phase: every role's states stay, and the active role has its activations."""
    loop, work = roles_of(setting), setting.workload
    resident = resident_roles(setting)
    side_by_side = min(loop.rollout_batch, loop.batch / setting.gpus)
    rollout = generating(
        setting,
        setting.model,
        setting.levers,
        side_by_side,
        work.prompt_tokens + work.response_tokens,
        work.prompt_tokens,
    )
    frozen = replace(setting.levers, tuning="frozen", weights_fp32=False)
    rollout["workspace"] += gathered_bytes(setting, setting.model, setting.levers)
    moments = [Moment("rollout", plus(resident, "policy", rollout))]
    again = [("logprobs", setting.model, True)] if loop.rescored else []
    longest = packed_sequences(setting, loop.batch / setting.gpus)
    for name, shape, vocabulary in [*again, *frozen_passes(setting)]:
        role = {"logprobs": "policy", "score": "reward", "reference": "ref", "value": "value"}[name]
        rows = min(longest, max(1.0, loop.rescored / setting.gpus)) if name == "logprobs" else longest
        passing = scoring(setting, shape, setting.levers, rows, work.max_tokens, vocabulary)
        held = {"policy": setting.levers, "value": value_levers(setting)}.get(role, frozen)
        passing["workspace"] += gathered_bytes(setting, shape, held)
        moments.append(Moment(name, plus(resident, role, passing)))
    return moments + update_moments(setting, resident)


def resident_roles(setting: Setting) -> Roles:
    """States that stay on the device through all phases."""
    loop, levers, shape = roles_of(setting), setting.levers, setting.model
    roles: Roles = {"policy": _states(setting, shape, levers)}
    base = frozen_role(setting, shape, levers)["weights"]
    if loop.ref and (levers.tuning != "lora" or loop.ref_levers is not None):
        adapted = 0.0 if levers.tuning == "lora" else base
        roles["ref"] = {"weights": adapted + adapter_bytes(setting, shape, loop.ref_levers)}
    if loop.layout == "shared_base":
        roles["reward"] = {"weights": adapter_bytes(setting, shape, loop.reward_levers or levers)}
        if has_value(setting):
            held = value_levers(setting)
            roles["value"] = {
                "weights": adapter_bytes(setting, shape, held),
                "optimizer": optimizer_bytes(setting, shape, held),
            }
        return roles
    if loop.reward is not None:
        adapted = frozen_role(setting, loop.reward, levers)["weights"]
        roles["reward"] = {"weights": adapted + adapter_bytes(setting, loop.reward, loop.reward_levers)}
    value = own_value(setting)
    if value is not None:
        roles["value"] = _states(setting, value, value_levers(setting))
    return roles


def adapter_bytes(setting: Setting, shape: ModelShape, levers: Levers | None) -> float:
    """Bytes on one device of the weights of an adapter alone; 0 for None."""
    if levers is None:
        return 0.0
    total = role_weights(setting, shape, levers)
    return total - frozen_role(setting, shape, levers)["weights"]


def _states(setting: Setting, shape: ModelShape, levers: Levers) -> Parts:
    return {"weights": role_weights(setting, shape, levers), "optimizer": optimizer_bytes(setting, shape, levers)}


def update_moments(setting: Setting, resident: Roles) -> list[Moment]:
    """Training: the passes of policy and value model over a micro-batch end in one loss, so both keep their
    activations until then.

    The value model's forward pass comes last, so its backward pass comes first, and its activations go first.
    """
    micro, packs = update_micro_batch(setting), setting.engine.packs
    passes, _ = update_passes(setting, mini_batch(setting))
    counted = setting.with_levers(micro_batch=micro, accumulation=max(1, floor(passes)))
    work = setting.workload
    loss_tokens = min(1.0, work.response_mean / max(1.0, work.mean_tokens))
    if setting.engine.whole_logits or (setting.loss.host and setting.hardware.is_cpu):
        loss_tokens = 1.0  # without Triton TRL's fused head reads every position
    longest = packed_sequences(setting, mini_batch(setting)) * work.max_tokens if packs else None
    counted = replace(
        counted,
        workload=replace(
            work, loss_tokens=loss_tokens, read_tokens=loss_tokens if packs else 1.0, micro_batch_tokens=longest
        ),
    )
    policy = _work_parts(training_moments(counted, setting.model, counted.levers, phase="update"), "policy")
    value = own_value(setting)
    if value is None:
        return [Moment(phase, plus(resident, "policy", parts)) for phase, parts in policy.items()]
    held = replace(value_levers(setting), micro_batch=micro, accumulation=counted.levers.accumulation)
    value_parts = _work_parts(
        training_moments(counted, value, held, phase="update", role="value", vocabulary=False), "value"
    )
    if roles_of(setting).layout == "shared_base":  # the policy has the base
        for parts in value_parts.values():
            del parts["weights"]
    kept = {part: policy["update:loss"][part] for part in ("activations", "weights")}
    # weights gathered for both stay until the single backward pass ends
    outside = waiting_gradients(setting, value, held)
    gradients = {"gradients": value_parts["update:step"].get("gradients", 0.0) + outside}
    if "weights" in value_parts["update:backward_end"]:
        gradients["weights"] = value_parts["update:backward_end"]["weights"]
    waiting = {"gradients": policy["update:step"].get("gradients", 0.0) if counted.levers.accumulation > 1 else 0.0}
    moments = [
        Moment(phase, plus(plus(resident, "value", parts), "policy", kept | waiting))
        for phase, parts in value_parts.items()
    ]
    return moments + [
        Moment(phase, plus(plus(resident, "policy", parts), "value", gradients)) for phase, parts in policy.items()
    ]


def _work_parts(moments: list[Moment], role: str) -> dict[str, Parts]:
    """Phase -> the parts of a role that are there beside its optimizer, its weights in use."""
    return {m.phase: {part: size for part, size in m.roles[role].items() if part != "optimizer"} for m in moments}


def plus(roles: Roles, role: str, parts: Parts) -> Roles:
    """`roles` with further parts in one of them; a role without states of its own (ref, adapter off) has these parts
    only.
    """
    return {**roles, role: {**roles.get(role, {}), **{part: size for part, size in parts.items() if size}}}
