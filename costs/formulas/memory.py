"""Peak device memory: the maximum over phases of the sum over roles of parts.

Parts: weights, gradients, optimizer, activations, logits, kv_cache, workspace. All in bytes on one device, as the
allocator counts them; `device_bytes` adds what lies outside of it.
States are in costs/formulas/states.py, what passes keep in costs/formulas/kept.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from config.work import cache_columns
from costs.formulas.kept import narrows, workspace
from costs.formulas.setting import DTYPE_BYTES, TRAINER_STAGES, Levers, Setting
from costs.formulas.states import Parts, role_weights
from costs.tables.losses import loss
from costs.tables.shapes import ModelShape

Roles = dict[str, Parts]

FRAGMENTATION = 1.04
"""Reserved over allocated memory of PyTorch's caching allocator in steady training: blocks are rounded to 2 MiB and
freed ones do not always fit the next request. Measured ratios lie between 1.01 and 1.10; used only to say whether a
plan fits.
"""


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a phase."""

    phase: str
    roles: Roles

    @property
    def total(self) -> float:
        return sum(sum(parts.values()) for parts in self.roles.values())


IMPORTS_BYTES = 454 * 2**20
"""Resident set of a stage on a CPU beside its tensors, on x86-64 Linux: 404 MiB after its imports, and 50 of its
libraries' code, rows, tokenizer and small objects.
"""
TRAINER_IMPORTS_BYTES = 550 * 2**20
"""The same with TRL's trainers, 490 and 60 MiB, over 21 configurations."""


def with_process(setting: Setting, moments: Iterable[Moment]) -> list[Moment]:
    """The moments of a stage with the role `process`, whose workspace is the memory outside of tensors."""
    outside = TRAINER_IMPORTS_BYTES if setting.stage in TRAINER_STAGES else IMPORTS_BYTES
    return [replace(moment, roles={**moment.roles, "process": {"workspace": 1.0 * outside}}) for moment in moments]


def phase_of(moment: Moment) -> str:
    """The phase that a moment belongs to: of `update:loss`, `update`."""
    return moment.phase.split(":")[0]


def phase_peak(moments: Iterable[Moment], phase: str) -> float:
    """Highest memory of the moments that belong to a phase, 0 where none is modelled."""
    return max((moment.total for moment in moments if phase_of(moment) == phase), default=0.0)


def peak(moments: Iterable[Moment]) -> Moment:
    """The moment with the highest memory."""
    return max(moments, key=lambda moment: moment.total)


def device_bytes(setting: Setting, allocated: float) -> float:
    """Device memory needed for `allocated` bytes: with the allocator's fragmentation, and the context outside of
    it.
    """
    return allocated if setting.hardware.is_cpu else allocated * FRAGMENTATION + setting.engine.context_bytes


def frozen_role(setting: Setting, shape: ModelShape, levers: Levers) -> Parts:
    """A role without training: weights in the compute type, no gradients, no optimizer."""
    return {"weights": role_weights(setting, shape, replace(levers, tuning="frozen", weights_fp32=False))}


def kv_cache_bytes(shape: ModelShape, dtype: str, sequences: float, tokens: float) -> float:
    """Keys and values of every layer (arXiv 2211.05102 section 2.1): 2 x layers x kv width x bytes, per token."""
    return 2 * shape.layers * shape.kv_width * DTYPE_BYTES[dtype] * sequences * tokens


PREFILLED_TOGETHER = 0.55
"""Share of a batch's prompt tokens that are read at once: our rollout reads prompts of like length together. Between
0.5 and 0.6 in 48 drawn settings (tests/pretend/plans.py); all of them where prompts are equally long.
"""


def generating(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int, prompt: int
) -> Parts:
    """Memory of a generating role besides its weights: the cache, one layer's prefill, and the logits of one
    position.
    """
    b = levers.dtype_bytes
    feed_forward = shape.experts_per_token * shape.expert_width or shape.mlp_width
    active = max(3 * feed_forward + 4 * shape.width, attending_width(shape))
    together = 1.0
    if setting.engine.name == "ours":
        tokens, together = cache_columns(prompt, tokens), PREFILLED_TOGETHER
        active += 2 * shape.layers * shape.kv_width  # of the prompts, until they are copied
    # the logits, fp32 copy and probabilities that sampling makes
    logits = sequences * shape.vocab * (b + 8)
    if setting.engine.whole_prefill:
        logits = max(logits, sequences * prompt * shape.vocab * (b + 4))
    cache = kv_cache_bytes(shape, levers.dtype, sequences, tokens)
    # a cache that grows by concatenation never fits into its previous block
    copies = 2.0 if setting.engine.concatenates_cache else 1.0
    return {
        "kv_cache": cache * copies,
        "activations": together
        * min(setting.prompts_of(sequences) * prompt, setting.engine.prefill_tokens)
        * active
        * b,
        "logits": logits,
        "workspace": workspace(setting, shape, levers),
    }


def scoring(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int, vocabulary: bool
) -> Parts:
    """Memory of a forward pass without gradients besides the weights: a layer at its widest, and log-probs in
    chunks.
    """
    b = levers.dtype_bytes
    feed_forward = shape.experts_per_token * shape.expert_width or shape.mlp_width
    active = max(3 * feed_forward + 4 * shape.width, attending_width(shape))
    if shape.layers == 1 and narrows(setting, shape, levers):
        active = attending_width(shape)
    if levers.attention == "eager":
        # the scores, and what the softmax makes of them
        active = max(active, 2 * shape.heads * tokens + 4 * shape.width)
    total = sequences * tokens
    layer, logits = total * active * b, 0.0
    if vocabulary:
        read = total * logits_share(setting)
        logits = read * loss(setting.engine.loss).bytes_per_token(
            shape.vocab, read, b, setting.engine.compiled, setting.accelerator_bytes
        )
        # of the trunk only the hidden states that are read are left, before and after the norm
        read_bytes = 2 * read * shape.width * b
        layer, logits = (layer, 0.0) if layer > read_bytes + logits else (read_bytes, logits)
    return {"activations": layer, "logits": logits, "workspace": workspace(setting, shape, levers)}


def attending_width(shape: ModelShape) -> int:
    """Numbers per token at the widest point of a layer's attention without gradients: the residual stream, its norm
    and what rotates it, and queries, keys and values before and after.
    """
    return 4 * shape.width + 3 * (shape.heads * shape.head_dim + shape.kv_width)


def logits_share(setting: Setting) -> float:
    """Share of the tokens of the longest sequences with logits."""
    work = setting.workload
    if setting.rlhf is not None and setting.engine.whole_logits:
        return 1.0
    return work.response_tokens / work.max_tokens if work.response_tokens else work.loss_tokens
