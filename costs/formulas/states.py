"""Bytes of a role's states on one device: weights, gradients, optimizer.

Source: ZeRO, arXiv 1910.02054 section 3.1 (2 + 2 + 12 bytes per parameter for mixed-precision Adam) and figure 1 for
what each stage divides by the number of devices.
"""

from config.work import BUCKET_ELEMENTS
from costs.formulas.setting import QUANT_BYTES, Levers, Setting
from costs.formulas.sharding import outside_of_layers, sharding_of
from costs.tables.shapes import ModelShape

Parts = dict[str, float]

MOMENTS = 2
"""Values that AdamW keeps per trained parameter."""


def adapter_parameters(shape: ModelShape, levers: Levers) -> float:
    """Trained parameters that are not in the base model.

    LoRA: rank x (inputs + outputs) of each adapted matrix (arXiv 2106.09685 section 4.1). LitGPT's, which adapts the
    parts of a packed projection one by one, comes to the same for two of the three.
    """
    if levers.tuning == "lora":
        copies = shape.experts or 1
        per_layer = sum(
            levers.lora_rank * (i + o) * (copies if name in ("gate", "up", "down") else 1)
            for name, (i, o, _) in shape.adapted(levers.lora_modules, shape.traits.packed_qkv).items()
        )
        return shape.layers * per_layer
    return 0.0


def trained_parameters(shape: ModelShape, levers: Levers) -> float:
    """Parameters with a gradient."""
    return 1.0 * shape.parameters if levers.tuning == "full" else adapter_parameters(shape, levers)


def base_weight_bytes(shape: ModelShape, levers: Levers, quantised_head: bool = False) -> float:
    """Bytes of a model's own weights, undivided."""
    plain = levers.dtype_bytes if levers.tuning == "frozen" else levers.weight_bytes
    if not levers.quantisation:
        return shape.parameters * plain
    quantised = shape.layers * shape.layer_matrix_parameters + (shape.vocab * shape.width if quantised_head else 0)
    remaining = shape.parameters - quantised + (shape.vocab * shape.width if quantised_head and shape.tied else 0)
    beside = 4.0 if levers.wide_unquantised else plain
    return quantised * QUANT_BYTES[levers.quantisation] + remaining * beside


def _adapter_bytes(levers: Levers, setting: Setting) -> float:
    """Bytes per adapter parameter: PEFT keeps adapters of 16-bit models in fp32."""
    return 4.0 if setting.engine.lora_input_bytes else levers.dtype_bytes


def shards(setting: Setting) -> Parts:
    """Number of shards of weights between steps, gradients and optimizer state. Source: arXiv 1910.02054 figure 1."""
    n, row = setting.gpus, sharding_of(setting)
    return {
        "weights": n if row.weights else 1,
        "gradients": n if row.gradients else 1,
        "optimizer": n if row.optimizer else 1,
    }


def stored_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights as they are stored, adapters included, undivided."""
    base = base_weight_bytes(shape, levers, setting.engine.quantises_head)
    return base + adapter_parameters(shape, levers) * _adapter_bytes(levers, setting)


def resting_weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of an idle role's weights on one device: its shard."""
    if levers.offload_weights:
        return 0.0
    return stored_bytes(setting, shape, levers) / shards(setting)["weights"]


def weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights on one device while it trains: its share, what is gathered at once, and the 16-bit
    copies of autocast.

    ZeRO-3 has two layers gathered (one computing, one being fetched) and what is outside of the layers; FSDP2 that
    keeps weights has all, and the buffer that one layer is gathered through.
    """
    row = sharding_of(setting)
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
        held += (2 * shape.layer_parameters + root) * _gathered_width(setting, levers)
    elif levers.offload_weights:  # one layer computing, one being fetched
        return 2 * shape.layer_parameters * levers.dtype_bytes
    return held + autocast_copies(setting, shape, levers)


def weights_in_backward(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights while its backward pass runs: autocast ended with the forward pass, and its copies are
    there because products keep them; with checkpointing, of one layer.
    """
    held, copies = weights(setting, shape, levers), autocast_copies(setting, shape, levers)
    if not copies or levers.checkpointing != "full":
        return held
    layer = shape.layer_matrix_parameters * levers.dtype_bytes
    return held - copies + min(copies, layer)


def weights_after_backward(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights at the end of the backward pass: no layer is gathered now, what is outside of the
    layers still is, and no copy of autocast is left.
    """
    row = sharding_of(setting)
    if not row.fsdp2:
        return weights(setting, shape, levers) - autocast_copies(setting, shape, levers)
    root = outside_of_layers(shape.parameters, shape.layers, shape.layer_parameters)
    return resting_weights(setting, shape, levers) + root * _gathered_width(setting, levers)


def weights_in_step(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights during the optimizer step."""
    if sharding_of(setting).fsdp2:
        return resting_weights(setting, shape, levers)
    return weights_after_backward(setting, shape, levers)


def _gathered_width(setting: Setting, levers: Levers) -> float:
    """Bytes of a base weight where it is gathered: as stored, or in the type of computing where the software has one
    for collectives.
    """
    if levers.quantisation:
        return QUANT_BYTES[levers.quantisation]
    stored = sharding_of(setting).fsdp2 and levers.tuning == "full"
    return levers.weight_bytes if stored else levers.dtype_bytes


def autocast_copies(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the 16-bit copies that autocast keeps of fp32 weights which learn: of each matrix it multiplied with,
    until the pass ends, however the weights themselves are divided. An embedding of its own is looked up, not
    multiplied.
    """
    row = sharding_of(setting)
    if not levers.mixed or levers.tuning != "full" or (row.micro_gathers and not row.fsdp2):
        return 0.0
    looked_up = 0 if shape.tied else shape.embedding_parameters
    return (shape.parameters - looked_up) * levers.dtype_bytes


def gathered_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes by which a role at rest grows for a pass without gradient: our stages gather it,
    and autocast copies what learns.
    """
    if setting.engine.name != "ours":
        return 0.0
    row, copies = sharding_of(setting), autocast_copies(setting, shape, levers)
    if not row.weights:
        return copies
    return stored_bytes(setting, shape, levers) + copies


def role_weights(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of a role's weights that are always there: of our stages its share, which grows while it is running, else
    all that `weights` counts.
    """
    return (resting_weights if setting.engine.name == "ours" else weights)(setting, shape, levers)


def gradient_width(setting: Setting, levers: Levers) -> float:
    """Bytes per gradient of a trained weight."""
    return levers.weight_bytes if levers.tuning == "full" else _adapter_bytes(levers, setting)


def gradient_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of all gradients of a role on one device, when they are complete. Where the optimizer is offloaded,
    divided gradients go to the host as they come (arXiv 2101.06840 section 4).
    """
    divided = shards(setting)["gradients"]
    if levers.offload_optimizer and sharding_of(setting).gradients:
        return 0.0
    return trained_parameters(shape, levers) * gradient_width(setting, levers) / divided


def unreduced_gradients(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of gradients that are whole at the end of a backward pass though they are divided: of FSDP2 those outside
    of the layers, the buffer that they are reduced through, and that of a layer.
    """
    if not sharding_of(setting).fsdp2 or levers.tuning != "full":
        return 0.0
    waiting = waiting_gradients(setting, shape, levers)
    return 2 * waiting + shape.layer_parameters * levers.weight_bytes


def waiting_gradients(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the gradients outside of the layers, which FSDP2 reduces when the whole backward pass is over, that of
    any other model with the same loss included.
    """
    if not sharding_of(setting).fsdp2 or levers.tuning != "full":
        return 0.0
    root = outside_of_layers(shape.parameters, shape.layers, shape.layer_parameters)
    return root * levers.weight_bytes


def bucket_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the buckets that gradients are summed in: torch's DDP copies all of them there, and keeps the buckets
    (`gradient_as_bucket_view` is off). Our alignment stages sum messages of 2^22 numbers, or of one matrix if that is
    larger, after a mini-batch.
    """
    if not sharding_of(setting).buckets or levers.tuning == "frozen":
        return 0.0
    size = trained_parameters(shape, levers)
    if setting.engine.name == "ours" and setting.rlhf is not None:
        largest = max([shape.vocab * shape.width, *(i * o for i, o, _ in shape.matrices.values())])
        size = min(size, BUCKET_ELEMENTS + (largest if levers.tuning == "full" else 0))
    return size * gradient_width(setting, levers)


def optimizer_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes of the optimizer state of a role on one device."""
    if levers.offload_optimizer:
        return 0.0
    eight = levers.optimizer == "adamw8bit"
    if levers.master_fp32:
        per = 4.0 * (1 + MOMENTS)
    elif eight:
        per = (1 + 4 / 256) * MOMENTS  # one fp32 scale in 256 values (arXiv 2110.02861 section 2.1)
    else:
        per = gradient_width(setting, levers) * MOMENTS
    wide = 4 * MOMENTS - per if eight else 0.0
    size = trained_parameters(shape, levers) * per + wide_state_parameters(setting, shape) * wide
    return size / shards(setting)["optimizer"]


def wide_state_parameters(setting: Setting, shape: ModelShape) -> float:
    """Parameters whose moments an 8-bit optimizer keeps in fp32: the token embedding's, where Transformers' Trainer
    makes the optimizer (its GlobalOptimManager override of nn.Embedding, as arXiv 2110.02861 section 2.3 asks for).
    """
    by_trainer = setting.engine.name.startswith("transformers") or (
        setting.engine.name == "ours" and setting.rlhf is None
    )
    if not by_trainer or setting.levers.tuning != "full" or setting.levers.master_fp32:
        return 0.0
    return shape.vocab * (shape.embedding_width or shape.width)
