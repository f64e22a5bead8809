"""What each sharding over n devices divides, and what it sends: a row each.

A gather of S bytes sends S (1 - 1/n) from each device, so does a reduce-scatter, and an all-reduce is both, one after
the other. Source: arXiv 1910.02054 section 7: 2 psi a step for data parallel and ZeRO-1 and 2 (gradients scattered,
weights gathered), 3 psi for ZeRO-3.
"""

from dataclasses import dataclass, replace

from costs.formulas.setting import Setting


@dataclass(frozen=True)
class Sharding:
    """What is divided, and how often all weights are gathered and all gradients reduced."""

    weights: bool = False
    """Divided between two steps."""
    gradients: bool = False
    optimizer: bool = False
    micro_gathers: int = 0
    """Gathers in the forward and backward pass of every micro-batch."""
    micro_reduces: int = 0
    step_gathers: int = 0
    step_reduces: int = 0
    buckets: bool = False
    """A copy of all gradients lies in buckets that are summed (torch's DDP)."""
    fsdp2: bool = False
    """torch's FSDP2 without a type of its own for collectives: gathered and reduced as stored, and what is outside of
    the layers is whole from the first forward to the end of the backward pass.
    """
    keeps_weights: bool = False
    """Layers stay gathered from the forward to the backward pass."""


WHOLE = Sharding(step_reduces=2, buckets=True)
ZERO_3 = Sharding(True, True, True, micro_gathers=2, micro_reduces=1)
PUBLISHED = {
    "ddp": WHOLE,
    "zero1": Sharding(optimizer=True, step_gathers=1, step_reduces=1),
    # DeepSpeed reduces gradients that are divided in every micro-batch: there is nowhere to keep them whole
    "zero2": Sharding(gradients=True, optimizer=True, step_gathers=1, micro_reduces=1),
    "zero3": ZERO_3,
    "fsdp": ZERO_3,
}
OWN_ZERO_3 = Sharding(True, True, True, micro_gathers=2, micro_reduces=1, fsdp2=True)
OWN = PUBLISHED | {
    "zero2": Sharding(True, True, True, micro_gathers=1, micro_reduces=1, fsdp2=True, keeps_weights=True),
    "zero3": OWN_ZERO_3,
    "fsdp": OWN_ZERO_3,
}
"""The shardings of training/distributed/sharding.py."""


WITHOUT_DDP = ("deepspeed-chat", "megatron")
"""Software that reduces gradients without torch's DDP."""


def sharding_of(setting: Setting) -> Sharding:
    """The row of a setting; a single device shards nothing."""
    if setting.gpus == 1:
        return Sharding()
    row = (OWN if setting.engine.name == "ours" else PUBLISHED)[setting.levers.parallel]
    return replace(row, buckets=False) if setting.engine.name in WITHOUT_DDP else row


def collective_bytes(size: float, devices: int) -> float:
    """Bytes that each of n devices sends to gather, or to reduce and scatter, `size` bytes in all: size (1 - 1/n).
    Source: arXiv 1910.02054 section 7.
    """
    return size * (1 - 1 / devices)


def outside_of_layers(parameters: float, layers: int, layer_parameters: float) -> float:
    """Parameters of FSDP's root unit: embedding, output head, last norm."""
    return parameters - layers * layer_parameters
