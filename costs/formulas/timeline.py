"""The moments of one training step at which memory can be at its highest, for one trained role.

Activations are freed while gradients come, so both are never complete at once: the peak is at the loss, in the
backward pass just after it, at the end of the backward pass, or in the optimizer step. `persistent` gradients
(accumulation) are there from the start.
"""

from costs.formulas.kept import activation_bytes, recomputed_bytes, workspace
from costs.formulas.memory import Moment
from costs.formulas.setting import Levers, Setting
from costs.formulas.sharding import sharding_of
from costs.formulas.states import (
    Parts,
    bucket_bytes,
    gradient_bytes,
    optimizer_bytes,
    shards,
    trained_parameters,
    unreduced_gradients,
    weights,
    weights_after_backward,
    weights_in_backward,
    weights_in_step,
)
from costs.tables.shapes import ModelShape


def training_moments(
    setting: Setting,
    shape: ModelShape,
    levers: Levers,
    phase: str = "train",
    role: str = "policy",
    vocabulary: bool = True,
) -> list[Moment]:
    """Memory of one role at each moment of a step. `vocabulary` False for a model with a scalar head: no logits, no
    large head gradient.
    """
    tokens = setting.workload.max_tokens
    sequences = (setting.workload.micro_batch_tokens or levers.micro_batch * tokens) / tokens
    held: Parts = {"weights": weights(setting, shape, levers), "optimizer": optimizer_bytes(setting, shape, levers)}
    row = sharding_of(setting)
    buckets = bucket_bytes(setting, shape, levers)
    summed = 0.0  # of our alignment stages, which sum gradients before a step
    if setting.engine.name == "ours" and setting.rlhf is not None:
        buckets, summed = 0.0, buckets
    gradients = gradient_bytes(setting, shape, levers)
    activations = activation_bytes(setting, shape, levers, sequences, tokens)
    recomputed = recomputed_bytes(setting, shape, levers, sequences, tokens)
    work = workspace(setting, shape, levers)
    head = head_gradient(shape, levers) if vocabulary else 0.0
    # chunked losses meet the head's gradient while the logits are still there
    chunk_head = head if setting.loss.chunked else 0.0
    persistent = gradients if levers.accumulation > 1 else 0.0
    # a tied matrix gets one gradient from the head, which waits, and one from the embedding, summed at the very end;
    # gradients of earlier micro-batches stay beside a new one until it is added
    table = head_gradient(shape, levers)
    waiting = head if shape.tied else 0.0
    new = table if persistent else 0.0
    unreduced = unreduced_gradients(setting, shape, levers)
    if unreduced:  # the table's gradients are among them
        waiting, new = min(waiting, unreduced), 0.0
    last = recomputed if levers.checkpointing == "full" else 0.0
    temporary = setting.engine.step_copies * trained_parameters(shape, levers) * levers.weight_bytes
    moments = {
        "loss": {
            "activations": activations,
            "logits": logits_bytes(setting, shape, levers) if vocabulary else 0.0,
            "gradients": persistent + chunk_head,
        },
        "backward": {
            "activations": activations + recomputed,
            "gradients": persistent + waiting if persistent and not row.fsdp2 else persistent + head,
            "workspace": work,
        },
        "backward_end": {
            "activations": last,
            "gradients": gradients + (unreduced or waiting + new),
            "workspace": work,
        },
        "step": {"gradients": gradients, "workspace": summed + temporary / shards(setting)["optimizer"]},
    }
    for parts in moments.values():
        parts["workspace"] = parts.get("workspace", 0.0) + buckets
    for name, weighs in (
        ("backward", weights_in_backward),
        ("backward_end", weights_after_backward),
        ("step", weights_in_step),
    ):
        moments[name]["weights"] = weighs(setting, shape, levers)
    return [
        Moment(f"{phase}:{name}", {role: {part: size for part, size in (held | parts).items() if size}})
        for name, parts in moments.items()
    ]


def logits_bytes(setting: Setting, shape: ModelShape, levers: Levers) -> float:
    """Bytes that the loss over the vocabulary holds at its peak."""
    tokens = (
        setting.workload.micro_batch_tokens or levers.micro_batch * setting.workload.max_tokens
    ) * setting.workload.loss_tokens
    token_bytes = setting.loss.bytes_per_token(
        shape.vocab, tokens, levers.dtype_bytes, setting.engine.compiled, setting.accelerator_bytes
    )
    return tokens * token_bytes


def head_gradient(shape: ModelShape, levers: Levers) -> float:
    """The gradient of the output head, which exists before any activation is freed."""
    return shape.vocab * shape.width * levers.weight_bytes if levers.tuning == "full" else 0.0


def loading_moment(setting: Setting, shape: ModelShape, levers: Levers) -> Moment:
    """Software that gives every device the full model before it is sharded needs both at once."""
    full = (
        shape.parameters * levers.weight_bytes
        if setting.engine.stages_whole_model and sharding_of(setting).weights
        else 0.0
    )
    return Moment("load", {"policy": {"weights": weights(setting, shape, levers), "workspace": full}})
