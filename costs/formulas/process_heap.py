"""Memory of a stage's process on a CPU beside its tensors: the interpreter with its libraries, and fragmentation of
the C library's heap.
"""

from collections.abc import Mapping, Sequence

from costs.formulas.activations import layer_kept
from costs.formulas.kept import layer_inputs
from costs.formulas.memory import Moment
from costs.formulas.ppo import mini_batch, packed_sequences
from costs.formulas.setting import Setting

IMPORTS_BYTES = 404 * 2**20
"""Resident set of a stage on a CPU after its imports, on x86-64 Linux."""
TRAINER_IMPORTS_BYTES = 490 * 2**20
"""The same with TRL's trainers."""
RUNTIME_BYTES = 50 * 2**20
"""Growth of a stage's process beside tensors after its imports: some 22 MiB of its libraries' code, rows, tokenizer,
small objects.
"""
TRAINER_RUNTIME_BYTES = 60 * 2**20
"""The same with TRL's trainers, over 21 configurations."""
HEAP_WASTE = 0.35
"""Bytes that lie in the C library's heap as holes, for each byte of tensors there when it is fullest: a block aligned
by torch needs a little more than the hole that one of its size left. Measured 0.2 to 0.5.
"""
MAPPED_BYTES = 2 * 2**20
"""Blocks of this size and above are not in the heap: training/process/allocator.py maps them individually."""
TRAINER_STAGES = ("sft", "pretrain", "reward", "dpo")
"""Stages that use TRL's trainers, whose imports take more time and memory."""


def imports_bytes(setting: Setting) -> float:
    """Resident set of a stage's process after its imports."""
    return TRAINER_IMPORTS_BYTES if setting.stage in TRAINER_STAGES else IMPORTS_BYTES


def with_process(setting: Setting, moments: Sequence[Moment]) -> list[Moment]:
    """The moments of a stage with the role `process`, whose workspace is all memory outside of tensors."""
    trainer = setting.stage in TRAINER_STAGES
    runtime = TRAINER_RUNTIME_BYTES if trainer else RUNTIME_BYTES
    fixed, shares = imports_bytes(setting) + runtime, heap_shares(setting)
    held = heap_bytes(shares, moments)
    beyond = [held[phase_of(m)] - in_heap(shares, m) for m in moments]
    return [
        Moment(m.phase, {**m.roles, "process": {"workspace": fixed + more}})
        for m, more in zip(moments, beyond, strict=True)
    ]


def phase_of(moment: Moment) -> str:
    """The phase that a moment belongs to: of `update:loss`, `update`."""
    return moment.phase.split(":")[0]


def heap_shares(setting: Setting) -> dict[str, float]:
    """Part -> share of it that lies in the heap."""
    return {"activations": activations_in_heap(setting), "gradients": gradients_in_heap(setting)}


def in_heap(shares: Mapping[str, float], moment: Moment) -> float:
    """Bytes of tensors that lie in the heap at a moment."""
    return sum(share * parts.get(part, 0.0) for part, share in shares.items() for parts in moment.roles.values())


def heap_bytes(shares: Mapping[str, float], moments: Sequence[Moment]) -> dict[str, float]:
    """Phase -> bytes that the heap holds. What was freed stays with it until the phase ends, when it is trimmed: at
    any moment of a phase it is as large as at its fullest, while large tensors come and go beside it.
    """
    fullest: dict[str, float] = {}
    for moment in moments:
        phase = phase_of(moment)
        fullest[phase] = max(fullest.get(phase, 0.0), (1 + HEAP_WASTE) * in_heap(shares, moment))
    return fullest


def activations_in_heap(setting: Setting) -> float:
    """Share of the activations of the policy's passes whose tensors are too small to be mapped."""
    shape, levers = setting.model, setting.levers
    tokens = pass_tokens(setting)
    longest = setting.workload.max_tokens
    if levers.checkpointing == "full":
        return float(tokens * layer_inputs(levers, shape) < MAPPED_BYTES)
    scores = shape.heads * longest * levers.dtype_bytes
    token_bytes = {
        "norms": shape.width * 4,
        "attention": scores if levers.attention == "eager" else shape.query_width * levers.dtype_bytes,
        "mask": longest * levers.dtype_bytes,
        "feed_forward": (shape.expert_width or shape.mlp_width) * levers.dtype_bytes,
    }
    kept = layer_kept(shape, levers, setting.engine, longest, setting.mask_tensor)
    small = sum(
        size
        for part, size in kept.items()
        if tokens * token_bytes.get(part, shape.width * levers.dtype_bytes) < MAPPED_BYTES
    )
    return small / sum(kept.values()) if kept else 1.0


def pass_tokens(setting: Setting) -> float:
    """Tokens of a pass with gradient. Where rows are packed, the last token of each sequence is left out: a tensor
    just too small to be mapped is as likely as one just large enough.
    """
    if setting.rlhf is None or not setting.engine.packs:
        return setting.micro_batch_tokens
    return packed_sequences(setting, mini_batch(setting)) * (setting.workload.max_tokens - 1)


def gradients_in_heap(setting: Setting) -> float:
    """Share of the gradients in matrices too small to be mapped; all of an adapter's."""
    shape, levers = setting.model, setting.levers
    if levers.tuning != "full":
        return 1.0
    tables = (1 if shape.tied else 2) * shape.vocab * shape.width
    large = sum(
        shape.layers * i * o for i, o, _ in shape.matrices.values() if i * o * levers.weight_bytes >= MAPPED_BYTES
    )
    if shape.vocab * shape.width * levers.weight_bytes >= MAPPED_BYTES:
        large += tables
    return max(0.0, 1 - large / shape.parameters)
