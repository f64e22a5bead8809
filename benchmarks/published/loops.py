"""Time of one iteration of PPO, GRPO or RLOO as people run it: all roles on all devices one after the other, or roles
on devices of their own; generation by the training stack, by a hybrid engine, or by a server.

Roles apart work side by side: scoring takes as long as the slowest of its roles, and so does training. Generation and
training still wait for each other unless they are one step apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.published.engines import engine, facts
from benchmarks.published.row import Role
from benchmarks.published.settings import Planned
from benchmarks.published.tensor_parallel import part_of, reducing
from costs.formulas.compute import gather_bytes
from costs.formulas.generation import generation
from costs.formulas.memory import kv_cache_bytes
from costs.formulas.ppo import ppo_phases, roles_of
from costs.formulas.setting import Levers, Setting
from costs.formulas.states import base_weight_bytes

GATHERED_AHEAD = 0.95
"""Share of the link that whole layers reach which are gathered one behind the other."""
CACHE_SHARE = 0.9
"""Of a device's memory, what a server uses for weights and cache."""


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration's parts."""

    generation: float
    scoring: float
    training: float
    transfer: float
    fixed: float = 0.0
    lag: int = 0

    @property
    def seconds(self) -> float:
        """Critical path with lag 0; one step apart, the longer of generation and the rest."""
        after = self.scoring + self.training + self.transfer
        longest = max(self.generation, after) if self.lag else self.generation + after
        return longest + self.fixed


def iteration(planning: Planned) -> Iteration:
    """The parts of one iteration."""
    setting, run = planning.setting, planning.run
    one_step = replace(setting, workload=replace(setting.workload, steps=1.0))
    roles = run.roles
    generating = (roles or {}).get("engine") or (roles or {}).get("policy") or setting.gpus
    rolled = _rollout(planning, one_step, generating)
    passes = _passes(one_step, roles, judged=run.stage == "ppo" or run.reward_model is not None)
    updates = _updates(one_step, roles)
    together = max if roles else sum
    sent = transfer_seconds(setting) if run.served else 0.0
    return Iteration(rolled, together(passes), together(updates), sent, facts(one_step.engine).loop_seconds, run.lag)


def transfer_seconds(setting: Setting) -> float:
    """Seconds of sending the policy's 16-bit weights to the engine that generates: broadcast by one process, over the
    link of a node, or over that process's own network card where the devices are of several nodes.
    """
    device = setting.hardware
    rate = device.link_bytes_per_second
    if setting.gpus > setting.devices_per_node:
        rate = min(rate, device.network_bytes_per_second)
    return setting.model.parameters * 2.0 / (rate * setting.efficiency.network)


def _on(setting: Setting, devices: int) -> Setting:
    return replace(setting, gpus=devices)


def _passes(one: Setting, own: Mapping[Role, int] | None, judged: bool) -> list[float]:
    """Seconds of each frozen role's passes over a rollout; rules take none."""
    roles: dict[str, Role] = {"logprobs": "policy", "score": "reward", "reference": "ref", "value": "value"}
    result = []
    for phase, role in roles.items():
        if phase == "score" and not judged:
            continue
        rows = ppo_phases(_on(one, (own or {}).get(role, one.gpus)))
        result += [row[2] for row in rows if row[0] == phase]
    return result


def _updates(one: Setting, own: Mapping[Role, int] | None) -> list[float]:
    """Seconds of the policy's and of the value model's update."""

    def update(setting: Setting) -> float:
        return next(row[2] for row in ppo_phases(setting) if row[0] == "update")

    alone = replace(one, stage="grpo")
    policy = update(_on(alone, (own or {}).get("policy", one.gpus)))
    if one.stage != "ppo":
        return [policy]
    critic = _on(one, (own or {}).get("value", one.gpus))
    both = update(critic)
    return [policy, max(0.0, both - update(replace(critic, stage="grpo")))]


def _rollout(planning: Planned, one: Setting, devices: int) -> float:
    """Seconds of generating all responses on `devices`."""
    run, loop = planning.run, roles_of(one)
    software = facts(one.engine)
    if run.served:
        software = engine("vllm")
    elif run.generator == "hybrid" or (run.generator is None and software.name == "deepspeed-chat"):
        software = engine("deepspeed-inference")
    whole = software is not one.engine
    frozen = replace(one.levers, tuning="frozen", parallel="ddp", weights_fp32=False, master_fp32=False)
    tensor = _tensor_parallel(one, frozen, devices) if whole else 1
    if tensor > 1:
        side = loop.rollout_batch * tensor / devices
        software = reducing(software, one.model, side, one.hardware, one.efficiency)
    model = part_of(one.model, tensor)
    group = replace(one, model=model, gpus=devices // tensor, engine=software, levers=frozen)
    copies = devices // tensor
    per_copy = loop.batch / copies
    side = min(float(loop.rollout_batch), per_copy)
    if run.served:
        side = max(1.0, min(side, _room(group)))
    rows = generation(group, model, frozen, per_copy / side, side)
    total = rows[0][2] + rows[1][2]
    if whole or one.levers.parallel not in ("zero3", "fsdp"):
        return total
    # ZeRO-3 gathers all weights for every token
    sharded = replace(one, gpus=devices)
    if sharded.gpus == 1:
        return total
    link = one.hardware.link_bytes_per_second * GATHERED_AHEAD
    gathers = gather_bytes(sharded, one.model, one.levers) / link
    return max(total, gathers * one.workload.response_tokens * per_copy / side)


def _tensor_parallel(one: Setting, levers: Levers, devices: int) -> int:
    """Fewest devices, a power of two, whose memory holds the weights with as much room again for half as large a
    cache.
    """
    size = one.model.parameters * levers.dtype_bytes
    ways = 1
    while ways * 2 <= devices and size * 1.5 > CACHE_SHARE * ways * one.hardware.usable_bytes:
        ways *= 2
    return ways


def side_by_side(setting: Setting, batch: float) -> float:
    """Sequences of a batch that are running together: all, or of a server those whose cache of average length there is
    room for.
    """
    if not facts(setting.engine).admits_by_cache:
        return batch
    work = setting.workload
    halfway = replace(work, response_tokens=work.response_tokens // 2)
    room = _room(replace(setting, workload=halfway))
    return max(1.0, min(batch, room))


def _room(group: Setting) -> float:
    """Sequences whose cache fits beside the weights."""
    tokens = group.workload.prompt_tokens + group.workload.response_tokens
    cache_bytes = kv_cache_bytes(group.model, group.levers.dtype, 1.0, tokens)
    weights = base_weight_bytes(group.model, group.levers)
    return (CACHE_SHARE * group.hardware.usable_bytes - weights) / cache_bytes
