"""Peak device memory: the maximum over phases of the sum over roles of parts.

Parts: weights, gradients, optimizer, activations, logits, kv_cache, workspace. All in bytes on one
device, as the allocator counts them; `device_bytes` adds what lies outside of it.

Source of the states: ZeRO, arXiv 1910.02054 section 3.1 (2 + 2 + 12 bytes per parameter for
mixed-precision Adam) and figure 1 for what each stage divides by the number of devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from costs.formulas.activations import layer_kept
from costs.formulas.setting import DTYPE_BYTES, QUANT_BYTES, Levers, Setting
from costs.tables.engines import loss
from costs.tables.shapes import ModelShape

Parts = dict[str, float]
Roles = dict[str, Parts]

FRAGMENTATION = 1.04
"""Reserved over allocated memory of PyTorch's caching allocator in steady training: blocks are
rounded to 2 MiB and freed ones do not always fit the next request. Measured ratios lie between 1.01
and 1.10; used only to say whether a plan fits.
"""

STATE_BYTES = {
    "adamw": 2.0,
    "paged_adamw": 2.0,
    "adamw8bit": 2.0,
    "paged_adamw8bit": 2.0,
    "sgd": 0.0,
    "adafactor": 0.0,
}
"""Moments kept per trained parameter: two for Adam, none for plain SGD; Adafactor's row and column
sums are negligible.
"""


@dataclass(frozen=True)
class Moment:
    """What one phase holds at one point in time."""

    phase: str
    roles: Roles

    @property
    def total(self) -> float:
        return sum(sum(parts.values()) for parts in self.roles.values())


def peak(moments: Iterable[Moment]) -> Moment:
    """The moment that needs most memory."""
    return max(moments, key=lambda moment: moment.total)


def device_bytes(setting: Setting, allocated: float) -> float:
    """What the device must have for `allocated` bytes: fragments of the allocator, and the context
    outside of it.
    """
    return (
        allocated
        if setting.hardware.is_cpu
        else allocated * FRAGMENTATION + setting.engine.context_bytes
    )


# ---------------------------------------------------------------- states: weights, gradients,
# optimizer


def adapter_parameters(shape: ModelShape, levers: Levers) -> float:
    """Trained parameters that are not in the base model.

    LoRA: rank x (inputs + outputs) of each adapted matrix (arXiv 2106.09685 section 4.1). LitGPT's,
    which adapts the parts of a packed projection one by one, comes to the same for two of the
    three.
    """
    if levers.tuning == "lora":
        copies = shape.experts or 1
        per_layer = sum(
            levers.lora_rank * (i + o) * (copies if name in ("gate", "up", "down") else 1)
            for name, (i, o, _) in shape.adapted(
                levers.lora_modules, shape.traits.packed_qkv
            ).items()
        )
        return shape.layers * per_layer
    if levers.tuning == "adapter":
        # ten prefix tokens and a gate a head from the third layer on
        return max(0, shape.layers - 2) * (10 * shape.width + shape.heads)
    if levers.tuning == "adapter_v2":
        return shape.layers * (
            2 * sum(o for _, o, _ in shape.matrices.values()) + shape.norms * shape.width
        )
    return 0.0


def trained_parameters(shape: ModelShape, levers: Levers) -> float:
    """Parameters that get a gradient."""
    return float(shape.parameters) if levers.tuning == "full" else adapter_parameters(shape, levers)


def base_weight_bytes(shape: ModelShape, levers: Levers, quantised_head: bool = False) -> float:
    """Bytes of a model's own weights, undivided."""
    plain = levers.weight_bytes if levers.tuning == "full" else levers.dtype_bytes
    if not levers.quantisation:
        return shape.parameters * plain
    quantised = shape.layers * shape.layer_matrix_parameters + (
        shape.vocab * shape.width if quantised_head else 0
    )
    remaining = (
        shape.parameters
        - quantised
        + (shape.vocab * shape.width if quantised_head and shape.tied else 0)
    )
    return quantised * QUANT_BYTES[levers.quantisation] + remaining * plain


def _adapter_bytes(levers: Levers, setting: Setting) -> float:
    """Bytes per adapter parameter: PEFT keeps adapters of 16-bit models in fp32."""
    return 4.0 if setting.engine.lora_input_bytes else levers.dtype_bytes


def shards(setting: Setting) -> Parts:
    """By how much weights, gradients and optimizer state are divided. Source: arXiv 1910.02054
    figure 1.
    """
    n, tp = setting.data_parallel, setting.levers.tensor_parallel
    level = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}[setting.levers.parallel]
    return {
        "weights": tp * (n if level >= 3 else 1),
        "gradients": tp * (n if level >= 2 else 1),
        "optimizer": tp * (n if level >= 1 else 1),
    }


def weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights on one device, adapters and the layers that sharding gathers
    included.
    """
    base = base_weight_bytes(shape, levers, setting.engine.quantises_head)
    adapters = adapter_parameters(shape, levers) * _adapter_bytes(levers, setting)
    divided = (base + adapters) / shards(setting)["weights"]
    if setting.levers.parallel in ("zero3", "fsdp") and setting.data_parallel > 1:
        # two layers at a time (one computing, one being fetched) and the embedding with the head
        # are whole
        unit = 2 * shape.layer_parameters + shape.vocab * shape.width
        divided += (
            unit
            * (levers.dtype_bytes if not levers.quantisation else QUANT_BYTES[levers.quantisation])
            / setting.levers.tensor_parallel
        )
    if levers.offload_weights:
        return (
            divided
            - (base + adapters) / shards(setting)["weights"]
            + 2 * shape.layer_parameters * levers.dtype_bytes
        )
    if (
        levers.mixed
        and levers.tuning == "full"
        and setting.levers.parallel in ("ddp", "zero1", "zero2")
    ):
        # autocast keeps a 16-bit copy of each weight it used
        divided += shape.parameters * levers.dtype_bytes / setting.levers.tensor_parallel
    return divided


def gathered_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes by which a divided role grows where it is whole for a while: our stages gather it for
    passes without gradient.
    """
    if (
        setting.levers.parallel not in ("zero3", "fsdp")
        or setting.data_parallel == 1
        or setting.engine.name != "ours"
    ):
        return 0.0
    whole = weights(
        setting.with_levers(parallel="ddp"),
        shape,
        replace(levers, parallel="ddp", offload_weights=False),
    )
    return max(0.0, whole - weights(setting, shape, levers))


def gradient_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of all gradients of a role on one device."""
    per = levers.weight_bytes if levers.tuning == "full" else _adapter_bytes(levers, setting)
    return trained_parameters(shape, levers) * per / shards(setting)["gradients"]


def optimizer_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the optimizer state of a role on one device. Paged state lives in host memory and is
    fetched page by page.
    """
    return (
        0.0
        if levers.offload_optimizer or levers.optimizer.startswith("paged")
        else state_bytes(setting, shape, levers)
    )


def state_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the optimizer state that belongs to one device, wherever it is kept."""
    moments = STATE_BYTES[levers.optimizer]
    if levers.master_fp32:
        per = 4 * (1 + moments)
    elif "8bit" in levers.optimizer:
        per = (1 + 4 / 256) * moments  # one fp32 scale in 256 values (arXiv 2110.02861 section 2.1)
    elif levers.optimizer == "paged_adamw":
        per = 4 * moments  # bitsandbytes keeps fp32 moments whatever the weights are
    else:
        per = (
            levers.weight_bytes if levers.tuning == "full" else _adapter_bytes(levers, setting)
        ) * moments
    return trained_parameters(shape, levers) * per / shards(setting)["optimizer"]


# ---------------------------------------------------------------- activations


def kept_per_token(setting: Setting, shape: ModelShape, levers: Levers, tokens: int) -> float:
    """Bytes per token that one layer keeps, on one device of a tensor-parallel group."""
    return (
        sum(layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor).values())
        / levers.tensor_parallel
    )


def layer_inputs(levers: Levers, shape: ModelShape) -> float:
    """Bytes per token of one layer's input: all that full checkpointing keeps (arXiv 2205.05198
    section 5).
    """
    return shape.width * (4.0 if levers.mixed else levers.dtype_bytes)


def activation_bytes(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int
) -> float:
    """Bytes kept between forward and backward pass for `sequences` of `tokens` tokens."""
    total, layers = sequences * tokens, shape.layers
    if levers.tuning == "adapter":
        layers -= 2  # nothing is trained below the third layer
    if levers.checkpointing == "none":
        stack = layers * kept_per_token(setting, shape, levers, tokens)
    elif levers.checkpointing == "selective":
        unquadratic = replace(levers, attention="flash", dropout=False)
        stack = layers * kept_per_token(setting, shape, unquadratic, tokens)
    else:
        stack = 0.0 if levers.offload_activations else layers * layer_inputs(levers, shape)
    # the final norm's input and output
    ends = 2 * shape.width * levers.dtype_bytes + 4 * shape.width
    spared = 0.0
    if levers.checkpointing != "full":  # a layer that is recomputed keeps its input whole
        kept = layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor)
        spared = kept.get("feed_forward", 0.0) + kept.get("norms", 0.0) / shape.norms
    return (
        total * (stack + ends)
        - spared_tokens(setting, shape, levers, total) * spared / levers.tensor_parallel
    )


NARROWED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose last layer our stages narrow: RESIDUAL_LAYERS of training/modeling/last_layer.py.
"""


def spared_tokens(setting: Setting, shape: ModelShape, levers: Levers, tokens: float) -> float:
    """Of `tokens` in packed rows, those at which the last layer's feed-forward part does not run,
    as nobody reads them.
    """
    narrows = setting.engine.packs and shape.family in NARROWED and levers.attention != "eager"
    return tokens * (1 - setting.workload.read_tokens) if narrows else 0.0


def recomputed_bytes(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int
) -> float:
    """Bytes of the one layer whose activations are rebuilt, or in use, while the backward pass is
    in it.
    """
    rebuilt = (
        kept_per_token(setting, shape, levers, tokens) if levers.checkpointing == "full" else 0.0
    )
    active = (
        2
        * ((shape.experts_per_token * shape.expert_width or shape.mlp_width) + shape.width)
        * levers.dtype_bytes
    )
    if (
        levers.attention == "eager"
        # the gradients of the softmax's output and of its input, when the feed-forward part's
        # tensors are gone
    ):
        kept = layer_kept(shape, levers, setting.engine, tokens, setting.mask_tensor)
        active = max(
            active, 2 * shape.heads * tokens * levers.dtype_bytes - kept.get("feed_forward", 0.0)
        )
    return sequences * tokens * (rebuilt + active / levers.tensor_parallel)


def workspace(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Copies that kernels make: the largest quantised matrix in 16 bit, twice, while it is
    multiplied forward and backward.
    """
    if not levers.quantisation or not levers.quantisation.startswith("nf4"):
        return 0.0
    head = shape.vocab * shape.width if setting.engine.quantises_head else 0
    return (
        2
        * DTYPE_BYTES["bf16"]
        * max(head, shape.width * max(shape.mlp_width, shape.query_width))
        / levers.tensor_parallel
    )


# ---------------------------------------------------------------- one role, trained or frozen


def frozen_role(setting: Setting, shape: ModelShape, levers: Levers) -> Parts:
    """A role that only computes: weights in the compute type (PPO.md), no gradients, no
    optimizer.
    """
    return {
        "weights": weights(setting, shape, replace(levers, tuning="frozen", weights_fp32=False))
    }


def kv_cache_bytes(
    shape: ModelShape, dtype: str, sequences: float, tokens: float, tensor_parallel: int = 1
) -> float:
    """Keys and values of every layer (arXiv 2211.05102 section 2.1): 2 x layers x kv width x bytes,
    per token.
    """
    return (
        2
        * shape.layers
        * shape.kv_width
        * DTYPE_BYTES[dtype]
        * sequences
        * tokens
        / tensor_parallel
    )


def generating(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int, prompt: int
) -> Parts:
    """What a generating role holds besides its weights: the cache, one layer's prefill, and the
    logits of one position.
    """
    b = levers.dtype_bytes
    active = 2 * (
        (shape.experts_per_token * shape.expert_width or shape.mlp_width) + 2 * shape.width
    )
    # the logits, fp32 copy and probabilities that sampling makes
    logits = sequences * shape.vocab * (b + 8)
    return {
        "kv_cache": kv_cache_bytes(shape, levers.dtype, sequences, tokens, levers.tensor_parallel),
        "activations": min(sequences * prompt, setting.engine.prefill_tokens)
        * active
        * b
        / levers.tensor_parallel,
        "logits": logits,
        "workspace": workspace(setting, shape, levers),
    }


def scoring(
    setting: Setting,
    shape: ModelShape,
    levers: Levers,
    sequences: float,
    tokens: int,
    vocabulary: bool,
) -> Parts:
    """What a forward pass without gradients holds besides the weights: a layer's widest moment, and
    log-probs in chunks.
    """
    b = levers.dtype_bytes
    active = 3 * (shape.experts_per_token * shape.expert_width or shape.mlp_width) + 4 * shape.width
    if levers.attention == "eager":
        # the scores, and what the softmax makes of them
        active = max(active, 2 * shape.heads * tokens + 4 * shape.width)
    total = sequences * tokens
    logits = 0.0
    if vocabulary:  # those of responses alone, by our own loop whatever trains
        read = total * said_share(setting)
        logits = read * loss(setting.engine.loss).bytes_per_token(
            shape.vocab, read, b, setting.engine.compiled
        )
    return {
        "activations": total * active * b / levers.tensor_parallel,
        "logits": logits,
        "workspace": workspace(setting, shape, levers),
    }


def said_share(setting: Setting) -> float:
    """Of the tokens of the longest sequences, those of the response; 1 where a stage does not tell
    them apart.
    """
    work = setting.workload
    return work.response_tokens / work.max_tokens if work.response_tokens else 1.0
