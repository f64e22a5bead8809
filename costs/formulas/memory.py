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
from costs.formulas.sharding import outside_of_layers, sharding_of
from costs.quantities import explained
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


@explained("B")
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


@explained("parameters")
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


@explained("parameters")
def trained_parameters(shape: ModelShape, levers: Levers) -> float:
    """Parameters that get a gradient."""
    return 1.0 * shape.parameters if levers.tuning == "full" else adapter_parameters(shape, levers)


@explained("B")
def base_weight_bytes(shape: ModelShape, levers: Levers, quantised_head: bool = False) -> float:
    """Bytes of a model's own weights, undivided."""
    plain = levers.dtype_bytes if levers.tuning == "frozen" else levers.weight_bytes
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
    beside = 4.0 if levers.wide_unquantised else plain
    return quantised * QUANT_BYTES[levers.quantisation] + remaining * beside


def _adapter_bytes(levers: Levers, setting: Setting) -> float:
    """Bytes per adapter parameter: PEFT keeps adapters of 16-bit models in fp32."""
    return 4.0 if setting.engine.lora_input_bytes else levers.dtype_bytes


@explained("")
def shards(setting: Setting) -> Parts:
    """By how much weights between two steps, gradients and optimizer state are divided. Source:
    arXiv 1910.02054 figure 1.
    """
    n, tp, row = setting.data_parallel, setting.levers.tensor_parallel, sharding_of(setting)
    return {
        "weights": tp * (n if row.weights else 1),
        "gradients": tp * (n if row.gradients else 1),
        "optimizer": tp * (n if row.optimizer else 1),
    }


@explained("B")
def stored_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights as they are stored, adapters included, undivided."""
    base = base_weight_bytes(shape, levers, setting.engine.quantises_head)
    return base + adapter_parameters(shape, levers) * _adapter_bytes(levers, setting)


@explained("B")
def resting_weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights on one device while it does nothing: its share of them."""
    if levers.offload_weights:
        return 0.0
    return stored_bytes(setting, shape, levers) / shards(setting)["weights"]


@explained("B")
def weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights on one device while it trains: its share, what is gathered at
    once, and the 16-bit copies of autocast.

    ZeRO-3 has two layers whole (one computing, one being fetched) and what is outside of the
    layers; FSDP2 that keeps weights has all, and the buffer that one layer is gathered through.
    """
    row, tp = sharding_of(setting), setting.levers.tensor_parallel
    held = resting_weights(setting, shape, levers)
    if row.micro_gathers and row.keeps_weights:
        return (
            held
            + stored_bytes(setting, shape, levers)
            + shape.layer_parameters * _gathered_width(setting, levers)
            + autocast_copies(setting, shape, levers)
        )
    if row.micro_gathers:
        root = outside_of_layers(shape.parameters, shape.layers, shape.layer_parameters)
        held += (2 * shape.layer_parameters + root) * _gathered_width(setting, levers) / tp
    elif levers.offload_weights:  # one layer computing, one on its way
        return 2 * shape.layer_parameters * levers.dtype_bytes
    return held + autocast_copies(setting, shape, levers)


@explained("B")
def weights_in_backward(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights while its backward pass runs: autocast ended with the forward pass,
    and its copies are there because products keep them; with checkpointing, of one layer.
    """
    held, copies = weights(setting, shape, levers), autocast_copies(setting, shape, levers)
    if not copies or levers.checkpointing != "full":
        return held
    one = shape.layer_matrix_parameters * levers.dtype_bytes / setting.levers.tensor_parallel
    return held - copies + min(copies, one)


@explained("B")
def weights_after_backward(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights when the backward pass is at its end: no layer is whole any more,
    what is outside of the layers still is, and no copy of autocast is left.
    """
    row = sharding_of(setting)
    if not row.fsdp2:
        return weights(setting, shape, levers) - autocast_copies(setting, shape, levers)
    root = outside_of_layers(shape.parameters, shape.layers, shape.layer_parameters)
    return resting_weights(setting, shape, levers) + root * _gathered_width(setting, levers)


@explained("B")
def weights_in_step(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights in the optimizer step."""
    if sharding_of(setting).fsdp2:
        return resting_weights(setting, shape, levers)
    return weights_after_backward(setting, shape, levers)


def _gathered_width(setting: Setting, levers: Levers) -> float:
    """Bytes of a base weight where it is gathered: as stored, or in the type of computing where
    the software has one for collectives.
    """
    if levers.quantisation:
        return QUANT_BYTES[levers.quantisation]
    stored = sharding_of(setting).fsdp2 and levers.tuning == "full"
    return levers.weight_bytes if stored else levers.dtype_bytes


@explained("B")
def autocast_copies(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the 16-bit copies that autocast keeps of fp32 weights which learn: of each matrix it
    multiplied with, until the pass ends, however the weights themselves are divided. An embedding
    of its own is looked up, not multiplied.
    """
    row = sharding_of(setting)
    if not levers.mixed or levers.tuning != "full" or (row.micro_gathers and not row.fsdp2):
        return 0.0
    looked_up = 0 if shape.tied else shape.embedding_parameters
    return (shape.parameters - looked_up) * levers.dtype_bytes / setting.levers.tensor_parallel


@explained("B")
def gathered_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes by which a role at rest grows for a pass without gradient: our stages gather it whole,
    and autocast copies what learns.
    """
    if setting.engine.name != "ours":
        return 0.0
    row, copies = sharding_of(setting), autocast_copies(setting, shape, levers)
    if not row.weights:
        return copies
    return stored_bytes(setting, shape, levers) / setting.levers.tensor_parallel + copies


def role_weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights that are always there: of our stages its share, which grows while
    it is at work, else all that `weights` counts.
    """
    return (resting_weights if setting.engine.name == "ours" else weights)(setting, shape, levers)


@explained("B")
def gradient_width(setting: Setting, levers: Levers) -> float:
    """Bytes of the gradient of one weight that learns."""
    return levers.weight_bytes if levers.tuning == "full" else _adapter_bytes(levers, setting)


@explained("B")
def gradient_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of all gradients of a role on one device, when they are complete. Where the optimizer
    is offloaded, divided gradients go to the host as they come (arXiv 2101.06840 section 4).
    """
    divided = shards(setting)["gradients"]
    if levers.offload_optimizer and sharding_of(setting).gradients:
        return 0.0
    return trained_parameters(shape, levers) * gradient_width(setting, levers) / divided


@explained("B")
def unreduced_gradients(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of gradients that are whole at the end of a backward pass though they are divided: of
    FSDP2 those outside of the layers, the buffer that they are reduced through, and that of a
    layer.
    """
    if not sharding_of(setting).fsdp2 or levers.tuning != "full":
        return 0.0
    waiting = waiting_gradients(setting, shape, levers)
    return 2 * waiting + shape.layer_parameters * levers.weight_bytes


@explained("B")
def waiting_gradients(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the gradients outside of the layers, which FSDP2 reduces when the whole backward
    pass is over, that of any other model with the same loss included.
    """
    if not sharding_of(setting).fsdp2 or levers.tuning != "full":
        return 0.0
    root = outside_of_layers(shape.parameters, shape.layers, shape.layer_parameters)
    return root * levers.weight_bytes


@explained("B")
def bucket_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the buckets that gradients are summed in: torch's DDP copies all of them there, and
    keeps the buckets (`gradient_as_bucket_view` is off). Our alignment stages sum messages of
    2^22 numbers, or of one matrix if that is larger, after a mini-batch.
    """
    if not sharding_of(setting).buckets or levers.tuning == "frozen":
        return 0.0
    size = trained_parameters(shape, levers)
    if setting.engine.name == "ours" and setting.rlhf is not None:
        largest = max([shape.vocab * shape.width, *(i * o for i, o, _ in shape.matrices.values())])
        size = min(size, SUMMED_AT_ONCE + (largest if levers.tuning == "full" else 0))
    return size * gradient_width(setting, levers)


SUMMED_AT_ONCE = 2**22
"""BUCKET_ELEMENTS of training/distributed/collectives.py, which this package can not import."""


@explained("B")
def optimizer_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the optimizer state of a role on one device. Paged state lives in host memory and is
    fetched page by page.
    """
    return (
        0.0
        if levers.offload_optimizer or levers.optimizer.startswith("paged")
        else state_bytes(setting, shape, levers)
    )


@explained("B")
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
    wide = 4 * moments - per if "8bit" in levers.optimizer else 0.0
    size = trained_parameters(shape, levers) * per + wide_state_parameters(setting, shape) * wide
    return size / shards(setting)["optimizer"]


@explained("parameters")
def wide_state_parameters(setting: Setting, shape: ModelShape) -> float:
    """Parameters whose moments an 8-bit optimizer keeps in fp32: the token embedding's, where
    Transformers' Trainer makes the optimizer (its GlobalOptimManager override of nn.Embedding, as
    arXiv 2110.02861 section 2.3 asks for).
    """
    by_trainer = setting.engine.name.startswith("transformers") or (
        setting.engine.name == "ours" and setting.rlhf is None
    )
    if not by_trainer or setting.levers.tuning != "full" or setting.levers.master_fp32:
        return 0.0
    return shape.vocab * (shape.embedding_width or shape.width)


# ---------------------------------------------------------------- activations


@explained("B/token")
def kept_per_token(setting: Setting, shape: ModelShape, levers: Levers, tokens: int) -> float:
    """Bytes per token that one layer keeps, on one device of a tensor-parallel group."""
    kept = layer_kept(
        shape, computing(setting, levers), setting.engine, tokens, setting.mask_tensor
    )
    places = setting.workload.attention_places
    if places > 1:  # what attention keeps it keeps at each place, and its outputs are collected
        kept["attention"] = places * kept["attention"] + shape.query_width * levers.dtype_bytes
    return sum(kept.values()) / levers.tensor_parallel


def computing(setting: Setting, levers: Levers) -> Levers:
    """`levers` as the layers see them: under FSDP's mixed precision weights are 16-bit when they
    are used, so the residual stream is too; under autocast it is fp32, as the embedding is.
    Source: arXiv 2304.11277 section 4.4.
    """
    row = sharding_of(setting)
    if not levers.mixed or not row.micro_gathers or row.fsdp2:
        return levers
    return replace(levers, weights_fp32=False)


@explained("B/token")
def selectively_kept(setting: Setting, shape: ModelShape, levers: Levers, tokens: int) -> float:
    """Bytes per token that one layer keeps with `selective` recomputation, on one device: all but
    scores, masks and dropout of attention (arXiv 2205.05198 section 5); or, by torchtitan's policy
    `op`, the layer's input, the attention output with the logarithm of its softmax sum, and the
    outputs of every other matrix product, the first, third ... of q, k, v, o, gate, up, down.
    Source of the latter: torchtitan, models/llama3/infra/parallelize.py.
    """
    if not setting.engine.selective_ops:
        unquadratic = replace(levers, attention="flash", dropout=False)
        return kept_per_token(setting, shape, unquadratic, tokens)
    inner = computing(setting, levers)
    outputs = [outputs * used for _, outputs, used in shape.matrices.values()][::2]
    attention = shape.query_width * inner.dtype_bytes + 4 * shape.heads
    products = sum(outputs) * inner.dtype_bytes
    return (layer_inputs(inner, shape) + attention + products) / levers.tensor_parallel


@explained("B/token")
def layer_inputs(levers: Levers, shape: ModelShape) -> float:
    """Bytes per token of one layer's input: all that full checkpointing keeps (arXiv 2205.05198
    section 5).
    """
    return shape.width * (4.0 if levers.mixed else levers.dtype_bytes)


@explained("B")
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
        stack = layers * selectively_kept(setting, shape, levers, tokens)
    else:
        inputs = layer_inputs(computing(setting, levers), shape)
        if setting.engine.sequence_parallel:
            inputs /= levers.tensor_parallel
        stack = 0.0 if levers.offload_activations else layers * inputs
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


@explained("tokens")
def spared_tokens(setting: Setting, shape: ModelShape, levers: Levers, tokens: float) -> float:
    """Of `tokens` in packed rows, those at which the last layer's feed-forward part does not run,
    as nobody reads them.
    """
    narrows = setting.engine.packs and shape.family in NARROWED and levers.attention != "eager"
    return tokens * (1 - setting.workload.read_tokens) if narrows else 0.0


@explained("B")
def recomputed_bytes(
    setting: Setting, shape: ModelShape, levers: Levers, sequences: float, tokens: int
) -> float:
    """Bytes of the one layer whose activations are rebuilt, or in use, while the backward pass is
    in it.
    """
    rebuilt = 0.0
    if levers.checkpointing == "full":
        rebuilt = kept_per_token(setting, shape, levers, tokens)
    elif levers.checkpointing == "selective":
        every = kept_per_token(setting, shape, levers, tokens)
        rebuilt = max(0.0, every - selectively_kept(setting, shape, levers, tokens))
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


@explained("B")
def workspace(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Copies that kernels make: the largest quantised matrix in 16 bit, twice, while it is
    multiplied forward and backward; none where a compiler puts unpacking into the product.
    """
    if levers.quantisation in (None, "fp8"):
        return 0.0
    if setting.engine.compiled and not levers.quantisation.startswith("nf4"):
        return 0.0
    head = shape.vocab * shape.width if setting.engine.quantises_head else 0
    return (
        2
        * DTYPE_BYTES["bf16"]
        * max(head, shape.width * max(shape.mlp_width, shape.query_width))
        / levers.tensor_parallel
    )


# ---------------------------------------------------------------- one role, trained or frozen


@explained("B")
def frozen_role(setting: Setting, shape: ModelShape, levers: Levers) -> Parts:
    """A role that only computes: weights in the compute type (PPO.md), no gradients, no
    optimizer.
    """
    return {
        "weights": role_weights(
            setting, shape, replace(levers, tuning="frozen", weights_fp32=False)
        )
    }


@explained("B")
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


@explained("B")
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
    if setting.engine.name in WHOLE_PREFILL:
        logits = max(logits, sequences * prompt * shape.vocab * (b + 4))
    cache = kv_cache_bytes(shape, levers.dtype, sequences, tokens, levers.tensor_parallel)
    # a cache that grows by concatenation never fits into the block that it had before
    copies = 2.0 if setting.engine.concatenates_cache else 1.0
    return {
        "kv_cache": cache * copies * levers.cache_bytes / b,
        "activations": min(sequences * prompt, setting.engine.prefill_tokens)
        * active
        * b
        / levers.tensor_parallel,
        "logits": logits,
        "workspace": workspace(setting, shape, levers),
    }


WHOLE_PREFILL = ("transformers-2022", "deepspeed-chat")
"""Software whose prefill makes the logits of the whole prompt and an fp32 copy of them:
Transformers before `logits_to_keep` (4.45).
"""


@explained("B")
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


@explained("")
def said_share(setting: Setting) -> float:
    """Of the tokens of the longest sequences, those of the response, or that the loss looks at."""
    work = setting.workload
    return work.response_tokens / work.max_tokens if work.response_tokens else work.loss_tokens
