"""What a stage's process on a CPU holds beside its tensors: the interpreter with its libraries, and what the C library's heap wastes."""

from collections.abc import Sequence

from costs.activations import layer_kept
from costs.memory import Moment, layer_inputs
from costs.setting import Setting

IMPORTS_BYTES = 460 * 2**20
"""Resident set of a stage on a CPU after its imports, on x86-64 Linux."""
TRAINER_IMPORTS_BYTES = 531 * 2**20
"""The same with TRL's trainers."""
RUNTIME_BYTES = 40 * 2**20
"""What a stage's process comes to hold beside tensors once it works: some 22 MiB of its libraries' code, rows, tokenizer, small objects."""
HEAP_WASTE = 0.7
"""Bytes that lie in the C library's heap as holes, for each byte of activations and of gradients that a phase has there. They take turns,
and neither fits well where the other was: a block aligned by torch needs a little more than the hole that one of its size left.
Measured 0.6 to 0.9 where either is most of what a stage holds."""
MAPPED_BYTES = 2 * 2**20
"""Blocks from here on are not in the heap: training/heap.py has them mapped and unmapped by themselves."""
TRAINER_STAGES = ("sft", "pretrain", "reward", "dpo", "distill", "rloo", "grpo")
"""Those on TRL's trainers, whose imports take more time and memory."""


def imports_bytes(setting: Setting) -> float:
    """Resident set of a stage's process after its imports, as this machine measured it where it did."""
    trainer, own = setting.stage in TRAINER_STAGES, setting.hardware.measured
    if own is not None:
        return float(own.machine.stages["sft" if trainer else "ppo"].after_imports_bytes)
    return TRAINER_IMPORTS_BYTES if trainer else IMPORTS_BYTES


def with_process(setting: Setting, moments: Sequence[Moment]) -> list[Moment]:
    """The moments of a stage with the role `process`, whose workspace is all that is no tensor."""
    fixed, wasted = imports_bytes(setting) + RUNTIME_BYTES, heap_waste(setting, moments)
    return [Moment(m.phase, {**m.roles, "process": {"workspace": fixed + wasted[phase_of(m)]}}) for m in moments]


def phase_of(moment: Moment) -> str:
    """The phase that a moment belongs to: of `update:loss`, `update`."""
    return moment.phase.split(":")[0]


def heap_waste(setting: Setting, moments: Sequence[Moment]) -> dict[str, float]:
    """Phase -> bytes that the heap holds beyond its tensors. Between two phases it is trimmed: what one wasted, the next does not hold."""
    small = {"activations": activations_in_heap(setting), "gradients": gradients_in_heap(setting)}
    most: dict[tuple[str, str], float] = {}
    for moment in moments:
        for part in small:
            held = sum(parts.get(part, 0.0) for parts in moment.roles.values())
            key = phase_of(moment), part
            most[key] = max(most.get(key, 0.0), held)
    return {phase: HEAP_WASTE * sum(most[phase, part] * share for part, share in small.items()) for phase, _ in most}


def activations_in_heap(setting: Setting) -> float:
    """Share of the activations of the policy's passes whose tensors are too small to be mapped."""
    shape, levers = setting.model, setting.levers
    tokens = setting.micro_batch_tokens
    longest = setting.workload.max_tokens
    if levers.checkpointing == "full":
        return float(tokens * layer_inputs(levers, shape) < MAPPED_BYTES)
    scores = shape.heads * longest * levers.dtype_bytes
    each = {
        "norms": shape.width * 4,
        "attention": scores if levers.attention == "eager" else shape.query_width * levers.dtype_bytes,
        "feed_forward": (shape.expert_width or shape.mlp_width) * levers.dtype_bytes,
    }
    kept = layer_kept(shape, levers, setting.engine, longest)
    in_heap = sum(size for part, size in kept.items() if tokens * each.get(part, shape.width * levers.dtype_bytes) < MAPPED_BYTES)
    return in_heap / sum(kept.values()) if kept else 1.0


def gradients_in_heap(setting: Setting) -> float:
    """Share of the gradients in matrices too small to be mapped; all of an adapter's."""
    shape, levers = setting.model, setting.levers
    if levers.tuning != "full":
        return 1.0
    tables = (1 if shape.tied else 2) * shape.vocab * shape.width
    large = sum(shape.layers * i * o for i, o, _ in shape.matrices.values() if i * o * levers.weight_bytes >= MAPPED_BYTES)
    if shape.vocab * shape.width * levers.weight_bytes >= MAPPED_BYTES:
        large += tables
    return max(0.0, 1 - large / shape.parameters)
